"""Deviation against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blend.recompute.kernels.dispatch import Kernels
from tests.recompute.kernels.common import DEVICE, DTYPES, HEAD_DIMS, ascending, cover, name_of, rms, triton_kernels

CASES = cover(
    {
        "dtype": DTYPES,
        "tokens": (1, 63, 500),
        "heads": (1, 3, 8, 32),
        "dims": HEAD_DIMS,
        "both": (False, True),
        "placed": (False, True),
        "strided": (False, True),
    },
    lambda case: case["tokens"] * case["heads"] * case["dims"] <= 300_000,
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_deviation(case: dict[str, Any]) -> None:
    check(case, triton_kernels())


def check(case: dict[str, Any], version: Kernels) -> None:
    """Refuse a version of the kernel that is wrong in this case."""
    g = torch.Generator().manual_seed(len(name_of(case)))
    heads, tokens, dims = case["heads"], case["tokens"], case["dims"]
    length = tokens + 400 if case["placed"] else tokens

    def random(tokens: int) -> torch.Tensor:
        if case["strided"]:
            return torch.randn(tokens, heads, dims, generator=g).to(DEVICE, case["dtype"]).transpose(0, 1)
        return torch.randn(heads, tokens, dims, generator=g).to(DEVICE, case["dtype"])

    fresh, cached = (random(tokens), random(tokens)), (random(length), random(length))
    positions = ascending(tokens, length, g) if case["placed"] else None
    wanted = torch.zeros(tokens, dtype=torch.float64, device=DEVICE)
    for a, b in list(zip(fresh, cached, strict=True))[: 1 + case["both"]]:
        there = b if positions is None else b[:, positions]
        wanted += (a.double() - there.double()).square().sum((0, 2))
    if case["both"]:
        got = version.deviation(fresh, cached, positions)
    else:
        got = version.deviation(fresh[0], cached[0], positions)
    assert got.dtype == torch.float32
    assert rms(got, wanted) < 1e-6

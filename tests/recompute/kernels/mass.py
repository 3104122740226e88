"""Attention mass against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blend.recompute.kernels.dispatch import Kernels
from tests.recompute.kernels.common import (
    BOUNDS,
    DEVICE,
    DTYPES,
    HEAD_DIMS,
    HEADS,
    SIZES,
    ascending,
    cover,
    name_of,
    rms,
    seen64,
    shares64,
    tiles_of,
    triton_kernels,
)

CASES = cover(
    {
        "dtype": DTYPES,
        "size": (*SIZES[:-1], (530, 600)),
        "heads": HEADS,
        "dims": HEAD_DIMS,
        "window": (None, 24),
        "softcap": (None, 5.0),
        "hidden": (False, True),
    },
    lambda case: tiles_of(case, 64, 64) <= 90,
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_mass(case: dict[str, Any]) -> None:
    check(case, triton_kernels())


def check(case: dict[str, Any], version: Kernels) -> None:
    """Refuse a version of the kernel that is wrong in this case."""
    g = torch.Generator().manual_seed(len(name_of(case)))
    kv_heads, group = case["heads"]
    rows, length = case["size"]
    positions = ascending(rows, length, g)
    heads = kv_heads * group
    query = torch.randn(rows, heads, case["dims"], generator=g).to(DEVICE, case["dtype"]).transpose(0, 1)
    key = torch.randn(kv_heads, length, case["dims"], generator=g).to(DEVICE, case["dtype"])
    visible = torch.rand(length, generator=g).to(DEVICE) > 0.4 if case["hidden"] else None
    scale = case["dims"] ** -0.5
    seen = seen64(positions, length, case["window"], visible)
    want = shares64(query, key, seen, scale, case["softcap"]).sum((0, 1))
    last = int(positions[-1])
    key[:, last + 1 :] = torch.nan  # nobody has written there
    got = version.mass(
        query, key, positions, scale=scale, window=case["window"], softcap=case["softcap"], visible=visible
    )
    assert got.dtype == torch.float32
    # The torch version multiplies in the dtype of the keys.
    assert rms(got, want) < (1e-5 if version.backend == "triton" else BOUNDS[case["dtype"]])
    assert got[last + 1 :].eq(0).all()
    assert float(got.sum()) == pytest.approx(heads * rows, rel=1e-4)

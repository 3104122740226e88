"""Moving keys against float64; what is not moved keeps every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Turns
from blend.recompute.rope import Rotation
from tests.recompute.kernels.assemble import turned64
from tests.recompute.kernels.common import BOUNDS, DEVICE, DTYPES, HEAD_DIMS, cover, name_of, rms, triton_kernels

CASES = cover(
    {
        "dtype": DTYPES,
        "spans": (((0, 1),), ((5, 68), (68, 69), (80, 210)), ((3, 500), (600, 601))),
        "heads": (1, 3, 8),
        "dims": HEAD_DIMS,
        "turning": (0.0, 0.25, 0.5, 1.0),
        "pairing": ("half", "interleaved"),
        "layout": ("canvas", "tokens first"),
        "all": (False, True),
    },
    lambda case: case["spans"][-1][1] * case["heads"] * case["dims"] <= 300_000,
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_move(case: dict[str, Any]) -> None:
    check(case, triton_kernels())


def check(case: dict[str, Any], version: Kernels) -> None:
    """Refuse a version of the kernel that is wrong in this case."""
    g = torch.Generator().manual_seed(len(name_of(case)))
    heads, dims, dtype = case["heads"], case["dims"], case["dtype"]
    bounds = case["spans"]
    start = bounds[-1][1]
    length = start + 9
    numbers = torch.randn(heads, length, dims, generator=g).to(DEVICE, dtype)
    if case["layout"] == "canvas":
        key = torch.full((2, heads, length + 5, dims), torch.nan, dtype=dtype, device=DEVICE)[1, :, :length]
    else:
        key = torch.empty(length, heads, dims, dtype=dtype, device=DEVICE).transpose(0, 1)
    key.copy_(numbers)
    mean = torch.randn(heads, len(bounds), dims, generator=g).to(DEVICE)
    moved = torch.zeros(length)
    for first, end in bounds:
        moved[first:end] = 1.0 if case["all"] else (torch.rand(end - first, generator=g) > 0.3).float()
    moved = moved.to(DEVICE)
    turns = rotation = None
    if case["turning"]:
        pairs = int(dims * case["turning"]) // 2
        rotation = Rotation(10000.0 ** -(torch.arange(pairs) / pairs), case["pairing"])
        turn = rotation.at(torch.arange(start, device=DEVICE))
        turns = Turns(turn.cos * moved[:start, None], turn.sin * moved[:start, None], case["pairing"])
    wanted = numbers.double()
    for span, (first, end) in enumerate(bounds):
        for at in range(first, end):
            if moved[at]:
                by = mean[:, span].double()
                wanted[:, at] += by if rotation is None else turned64(by, rotation, at)
    version.move(key, mean, Spans(bounds, moved[: start + 4]), turns)  # the prompt is shorter than the canvas
    here = moved > 0
    assert torch.equal(key[:, ~here], numbers[:, ~here])
    if here.any():
        assert rms(key[:, here], wanted[:, here]) < BOUNDS[dtype]

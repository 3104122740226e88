"""Assembling stored chunks against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Rotation
from tests.recompute.kernels.common import BOUNDS, DEVICE, DTYPES, HEAD_DIMS, cover, name_of, rms, triton_kernels

CASES = cover(
    {
        "dtype": DTYPES,
        "stored": ("same", torch.float8_e4m3fn, torch.int8),
        "chunks": ((1,), (63,), (63, 1, 211), (500, 500)),
        "heads": (1, 3, 8),
        "dims": HEAD_DIMS,
        "turning": (0.0, 0.25, 0.5, 1.0),
        "pairing": ("half", "interleaved"),
        "paged": (False, True),
        "scales": ("token", "head", "none"),
    },
    lambda case: (
        (case["scales"] == "none") == (case["stored"] == "same")
        and sum(case["chunks"]) * case["heads"] * case["dims"] <= 300_000
    ),
)


def turned64(keys: torch.Tensor, rotation: Rotation, shift: int) -> torch.Tensor:
    """``keys`` ``[..., D]`` turned as complex numbers, in float64."""
    pairs = len(rotation.inverse_frequencies)
    angle = rotation.inverse_frequencies.double() * shift
    turn = torch.polar(torch.ones_like(angle), angle).to(keys.device)
    out = keys.double().clone()
    if rotation.pairing == "half":
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    else:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    found = torch.complex(out[..., first], out[..., second]) * turn
    out[..., first], out[..., second] = found.real, found.imag
    return out


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_assemble(case: dict[str, Any]) -> None:
    check(case, triton_kernels())


def check(case: dict[str, Any], version: Kernels) -> None:
    """Refuse a version of the kernel that is wrong in this case."""
    g = torch.Generator().manual_seed(len(name_of(case)))
    heads, dims, dtype = case["heads"], case["dims"], case["dtype"]
    kind = dtype if case["stored"] == "same" else case["stored"]
    payloads, scales = [], []
    for count in case["chunks"]:
        numbers = torch.randn(2, 2, heads, count + 2, dims, generator=g)
        payloads.append((numbers * 40).round().to(DEVICE, kind) if kind == torch.int8 else numbers.to(DEVICE, kind))
        scale = torch.rand(2, 2, heads, count + 2, generator=g).to(DEVICE) + 0.5
        scales.append(scale[..., :1].expand_as(scale) if case["scales"] == "head" else scale)
    counts = list(case["chunks"])
    stored = Stored(payloads, None if case["scales"] == "none" else scales, counts)
    shifts = [5000 - 977 * i for i in range(len(counts))]
    rotation = None
    if case["turning"]:
        pairs = int(dims * case["turning"]) // 2
        rotation = Rotation(10000.0 ** -(torch.arange(pairs) / pairs), case["pairing"])
    turns = None if rotation is None else Turns.of(rotation, shifts, DEVICE)

    total = sum(counts)
    room = -(-(total + 40) // 16)
    slots = torch.randperm(room * 16, generator=g)[:total].to(DEVICE)
    slots[1 :: max(7, total // 5)] = -1  # left out
    shape = (2, room, 16, heads, dims) if case["paged"] else (2, heads, room * 16, dims)
    key, value = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    version.assemble(stored, 1, key, value, slots, turns)

    wanted = torch.full((2, heads, room * 16, dims), torch.nan, dtype=torch.float64, device=DEVICE)
    start = 0
    for chunk, count in enumerate(counts):
        numbers = payloads[chunk][1, :, :, :count].double()
        if case["scales"] != "none":
            numbers = numbers * scales[chunk][1, :, :, :count, None].double()
        k, v = numbers
        if rotation is not None:
            k = turned64(k, rotation, shifts[chunk])
        own = slots[start : start + count]
        wanted[:, :, own[own >= 0]] = torch.stack((k, v))[:, :, own >= 0]
        start += count
    for got, want in zip((key, value), wanted, strict=True):
        found = got.flatten(0, 1).transpose(0, 1) if case["paged"] else got
        written = ~want.isnan()
        assert torch.equal(written, ~found.isnan())
        if written.any():
            assert rms(found[written], want[written]) < BOUNDS[dtype]
    if case["stored"] == "same":
        kept = ~wanted[1].isnan()
        found = value.flatten(0, 1).transpose(0, 1) if case["paged"] else value
        assert torch.equal(found[kept], wanted[1][kept].to(dtype))

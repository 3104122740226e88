"""Placing stored chunks on a canvas, against turning and copying each chunk by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from blend.errors import InvalidInput
from blend.helper import Helper
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.canvas import Canvas
from blend.recompute.kernels import cpu
from blend.recompute.kernels.cpu import Placement, Tables
from blend.recompute.kernels.dispatch import Kernels, kernels
from blend.recompute.rope import Pairing, Rotation

CPU = torch.device("cpu")
TORCH = kernels(CPU)


def rotation(pairs: int, pairing: Pairing = "half", theta: float = 1e4) -> Rotation:
    return Rotation(theta ** -(torch.arange(pairs) / pairs), pairing)


@pytest.mark.parametrize("version", [TORCH, kernels(CPU, "reference")], ids=lambda version: version.backend)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("pairs", "dims"), [(8, 16), (3, 16), (40, 80)])
def test_keys_turn_by_their_chunk_s_shift_and_values_stay(
    dtype: torch.dtype, pairing: Pairing, pairs: int, dims: int, version: Kernels
) -> None:
    torch.manual_seed(pairs)
    one = rotation(pairs, pairing)
    rotations = [one, None, rotation(pairs, pairing, 500.0), one]
    sizes, starts, stored_at = [1, 63, 7], [2, 3, 90], [1, 1, 900]  # the last turns back
    firsts = [0, 2, 1]
    canvas = Canvas(4, 2, 100, dims, dtype, CPU)
    chunks = [torch.randn(4, 2, 2, size + 2, dims).to(dtype) for size in sizes]
    pieces = [Piece(*each) for each in zip(starts, sizes, stored_at, firsts, strict=True)]
    assembly = Assembly(canvas, pieces, rotations, version)
    for layer in range(4):
        assembly.put(layer, [chunk[layer] for chunk in chunks])
    covered = torch.zeros(100, dtype=torch.bool)
    for piece, chunk in zip(pieces, chunks, strict=True):
        span = slice(piece.start, piece.start + piece.tokens)
        covered[span] = True
        for layer, turn in enumerate(rotations):
            keys, values = chunk[layer][:, :, piece.first : piece.first + piece.tokens]
            want = keys if turn is None else turn.rotate(keys, piece.start - piece.stored_at - piece.first)
            # A product may be rounded once or twice before the one rounding to the canvas's dtype.
            assert_close(canvas.k[layer, :, span], want, rtol=torch.finfo(dtype).eps, atol=1e-6)
            assert torch.equal(canvas.v[layer, :, span], values)
    assert not canvas.k[:, :, ~covered].any()
    assert not canvas.v[:, :, ~covered].any()


@pytest.mark.parametrize("sizes", [(1,), (40, 1, 1), (1, 1, 40), (9, 9, 9, 9), ()], ids=str)
def test_a_helper_changes_nothing(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SHARED_NBYTES", 0)
    torch.manual_seed(1)
    chunks = [torch.randn(2, 3, size, 8) for size in sizes]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    pieces = [Piece(start, size, 500) for start, size in zip(starts, sizes, strict=True)]
    alone, helped = (Canvas(2, 3, 50, 8, torch.float32, CPU) for _ in range(2))
    helper = Helper("placing")
    for canvas, taking in ((alone, None), (helped, helper)):
        assembly = Assembly(canvas, pieces, [rotation(4), None], TORCH, taking)
        for layer in range(2):
            assembly.put(layer, chunks)
    helper.close()
    assert torch.equal(alone.k, helped.k)
    assert torch.equal(alone.v, helped.v)


def test_odd_values_keep_their_meaning() -> None:
    """Infinities, zeros of both signs, subnormals, and ties between two roundings."""
    bits = torch.arange(0, 65536, 1, dtype=torch.int32).to(torch.uint16)
    keys = bits.view(torch.bfloat16)[: 65536 // 16 * 16].view(1, -1, 16)
    kv = torch.stack((keys, keys))
    turn = rotation(8)
    canvas = Canvas(1, 1, keys.shape[1], 16, torch.bfloat16, CPU)
    Assembly(canvas, [Piece(0, keys.shape[1], 7)], [turn], TORCH).put(0, [kv])
    want = turn.rotate(keys, -7)
    assert_close(canvas.k[0], want, rtol=2**-7, atol=1e-38, equal_nan=True)
    assert torch.equal(canvas.v[0].view(torch.uint16), keys.view(torch.uint16)), "values are copied bit by bit"


def test_it_wants_one_tensor_for_each_piece() -> None:
    canvas = Canvas(1, 1, 8, 4, torch.float32, CPU)
    with pytest.raises(InvalidInput, match="2 pieces"):
        Assembly(canvas, [Piece(0, 1, 0), Piece(1, 1, 0)], [None], TORCH).put(0, [torch.zeros(2, 1, 1, 4)])


@pytest.mark.parametrize(
    "kv",
    [
        torch.zeros(2, 1, 2, 4),  # too few tokens
        torch.zeros(1, 1, 3, 4),
        torch.zeros(2, 2, 3, 4),
        torch.zeros(2, 1, 3, 2),
        torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16),
        torch.zeros(2, 1, 3, 8)[..., ::2],
        torch.zeros(2, 1, 3, 4, device="meta"),
    ],
)
def test_memory_is_not_read_by_address_unless_it_is_as_it_should_be(kv: torch.Tensor) -> None:
    canvas = Canvas(1, 1, 8, 4, torch.float32, CPU)
    with pytest.raises(InvalidInput, match="kv"):
        Assembly(canvas, [Piece(0, 3, 0)], [None], TORCH).put(0, [kv])
    with pytest.raises(InvalidInput, match="kv"):
        Assembly(canvas, [Piece(0, 3, 0, 1)], [None], TORCH).put(0, [torch.zeros(2, 1, 3, 4)])
    assert not canvas.k.any()


@pytest.mark.parametrize(
    "piece", [Piece(6, 3, 0), Piece(-1, 3, 0), Piece(0, -1, 0), Piece(9, 0, 0), Piece(0, 3, 0, -1)]
)
def test_nothing_is_placed_outside_the_canvas(piece: Piece) -> None:
    canvas = Canvas(1, 1, 8, 4, torch.float32, CPU)
    with pytest.raises(InvalidInput, match=r"spans\[0\]"):
        Assembly(canvas, [piece], [None], TORCH)
    with pytest.raises(InvalidInput, match="layer"):
        Assembly(canvas, [Piece(0, 3, 0)], [None, None], TORCH).put(1, [torch.zeros(2, 1, 3, 4)])


def test_a_prompt_without_chunks_places_none() -> None:
    canvas = Canvas(1, 1, 8, 4, torch.float32, CPU)
    Assembly(canvas, [], [rotation(2)], TORCH).put(0, [])
    assert not canvas.k.any()


def test_a_rotation_wider_than_the_head_is_refused() -> None:
    canvas = Canvas(1, 1, 8, 4, torch.float32, CPU)
    with pytest.raises(InvalidInput, match="angles"):
        Assembly(canvas, [Piece(0, 3, 1)], [rotation(4)], TORCH).put(0, [torch.ones(2, 1, 3, 4)])
    assert not canvas.k.any()


def test_a_placement_checks_its_canvas_and_tables() -> None:
    k = torch.zeros(1, 1, 8, 4)
    for v in (torch.zeros(1, 1, 7, 4), torch.zeros(1, 1, 8, 4, dtype=torch.bfloat16), torch.zeros(1, 8, 4)):
        with pytest.raises(InvalidInput, match="v"):
            Placement(k, v, [(0, 1, 0)])
    for wrong in (k.half(), k.transpose(2, 3), k.to("meta")):
        with pytest.raises(InvalidInput, match="k"):
            Placement(wrong, wrong, [(0, 1, 0)])
    placement, kv = Placement(k, k.clone(), [(0, 1, 0), (1, 1, 0)]), [torch.ones(2, 1, 1, 4)] * 2
    still = np.zeros(2, np.bool_)
    for angles in (np.zeros((1, 2, 2), np.float32), np.zeros((2, 2, 2)), np.zeros((2, 1, 2), np.float32)):
        with pytest.raises(InvalidInput, match="angles"):
            placement.place(0, kv, Tables(angles, still))
    with pytest.raises(InvalidInput, match="turned"):
        placement.place(0, kv, Tables(np.zeros((2, 2, 2), np.float32), still[:1]))
    with pytest.raises(InvalidInput, match="kv"):
        placement.place(0, [torch.ones(2, 1, 4), *kv[1:]], Tables(np.zeros((2, 2, 2), np.float32), still))
    assert not k.any()

"""Moves keys or values of one layer's canvas in place, all spans in one launch.

One program takes some positions of one span and one head. Positions that are not moved are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.checks import check_numbers, padded
from blend.recompute.kernels.launch import launch
from blend.recompute.kernels.memory import check_rows
from blend.recompute.kernels.spans import TILE, Spans
from blend.recompute.kernels.stored import Turns


@triton.jit
def _add(target: tl.tensor, move: tl.tensor, held: tl.tensor) -> None:
    """Add to what ``target`` points to, in float32."""
    found = tl.load(target, mask=held, other=0.0).to(tl.float32) + move
    tl.store(target, found.to(target.dtype.element_ty), mask=held)


@triton.jit
def _move(
    key: tl.tensor,
    mean: tl.tensor,
    tiles: tl.tensor,
    moved: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    spans: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """``BLOCK_T`` positions of one span and one KV head: grid ``(tiles, KVH)``."""
    head = tl.program_id(1).to(tl.int64)
    tile = tiles + tl.program_id(0) * 3
    token = tl.load(tile + 1) + tl.arange(0, BLOCK_T)
    valid = token < tl.load(tile + 2)
    valid = valid & (tl.load(moved + token, mask=valid, other=0.0) != 0)
    far = token.to(tl.int64)[:, None]
    target = key + head * head_stride + far * token_stride
    by = mean + (head * spans + tl.load(tile)) * HEAD_DIM
    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_P)
        held = valid[:, None] & (pair < PAIRS)[None, :]
        c = tl.load(cos + far * PAIRS + pair[None, :], mask=held, other=0.0)
        s = tl.load(sin + far * PAIRS + pair[None, :], mask=held, other=0.0)
        if INTERLEAVED:
            # Both members in one access, side by side as they lie.
            both = tl.arange(0, 2 * BLOCK_P)
            a, b = tl.split(tl.reshape(tl.load(by + both, mask=both < 2 * PAIRS, other=0.0), [BLOCK_P, 2]))
            x, y = a[None, :] * c - b[None, :] * s, b[None, :] * c + a[None, :] * s
            turned = tl.reshape(tl.join(x, y), [BLOCK_T, 2 * BLOCK_P])
            _add(target + both[None, :], turned, valid[:, None] & (both < 2 * PAIRS)[None, :])
        else:
            a = tl.load(by + pair, mask=pair < PAIRS, other=0.0)[None, :]
            b = tl.load(by + PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
            _add(target + pair[None, :], a * c - b * s, held)
            _add(target + PAIRS + pair[None, :], b * c + a * s, held)
    if HEAD_DIM > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        straight = tl.load(by + rest, mask=rest < HEAD_DIM, other=0.0)[None, :]
        _add(target + rest[None, :], straight, valid[:, None] & (rest < HEAD_DIM)[None, :])


def move(key: Tensor, mean: Tensor, spans: Spans, turns: Turns | None) -> None:
    """See :func:`blend.recompute.kernels.reference.move`."""
    _check(key, mean, spans, turns)
    heads, _, head_dim = key.shape
    pairs = 0 if turns is None else turns.cos.shape[1]
    cos, sin = (spans.moved, spans.moved) if turns is None else (turns.cos, turns.sin)
    launch(
        _move,
        (len(spans.tiles), heads),
        key,
        mean.contiguous(),
        spans.tiles,
        spans.moved,
        cos,
        sin,
        len(spans),
        *key.stride()[:2],
        HEAD_DIM=head_dim,
        BLOCK_T=TILE,
        PAIRS=pairs,
        BLOCK_P=1 << (max(pairs, 1) - 1).bit_length(),
        BLOCK_REST=1 << max(head_dim - 2 * pairs - 1, 0).bit_length(),
        INTERLEAVED=turns is not None and turns.pairing == "interleaved",
        num_warps=8 if padded(head_dim) > 64 else 4,  # with 4 wide heads do not fit the registers
    )


def _check(key: Tensor, mean: Tensor, spans: Spans, turns: Turns | None) -> None:
    """Refuse keys, means, spans or turns that do not fit each other."""
    check_numbers("key", key, 3)
    check_rows("key", key, dense=False)
    heads, length, head_dim = key.shape
    _check_float("mean", mean, (heads, len(spans), head_dim), key.device)
    last = max((end for _, end in spans.bounds), default=0)
    _check_float("moved", spans.moved, (max(last, len(spans.moved)),), key.device)
    if last > length:
        raise InvalidInput("spans", spans.bounds, f"ends up to {length}")
    if turns is None:
        return
    positions, pairs = turns.cos.shape
    if positions < last or not 1 <= pairs <= head_dim // 2:
        raise InvalidInput("turns", (positions, pairs), f"{last} or more positions, 1 to {head_dim // 2} pairs")
    for table in (turns.cos, turns.sin):
        _check_float("turns", table, (positions, pairs), key.device)
        if not table.is_contiguous():
            raise InvalidInput("turns.strides", table.stride(), "those of a contiguous table")


def _check_float(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, torch.float32, device):
        raise InvalidInput(name, (tuple(tensor.shape), tensor.dtype), f"{list(shape)} float32 on {device}")

"""Writes the fresh keys and values of a batch's rows to where they belong, all requests in one launch.

Where asked, it takes the deviation of what stood there before on the way: the old numbers are read by the program
that replaces them, once. Without it, each number is read once and written once.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.checks import aligned, check_like, check_memory, padded
from blend.recompute.kernels.device import origin, places
from blend.recompute.kernels.launch import launch
from blend.recompute.kernels.memory import Memory


@triton.jit
def _replace(fresh: tl.tensor, target: tl.tensor, held: tl.tensor, COMPARE: tl.constexpr) -> Any:
    """Store what ``fresh`` points to at ``target``; returns the squared distance from what was there, ``[BLOCK_R]``."""
    new = tl.load(fresh, mask=held, other=0.0)
    if COMPARE:
        old = tl.load(target, mask=held, other=0.0).to(tl.float32)
        change = new.to(tl.float32) - old
        tl.store(target, new, mask=held)
        return tl.sum(change * change, 1)
    else:
        tl.store(target, new, mask=held)
        return tl.zeros([new.shape[0]], tl.float32)


@triton.jit(do_not_specialize=["layer", "rows"])
def _commit(
    fresh_key: tl.tensor,
    fresh_value: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    width: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    row_positions: tl.tensor,
    row_requests: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    key_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    COMPARE_KEY: tl.constexpr,
    COMPARE_VALUE: tl.constexpr,
) -> None:
    """A block of rows and ``HEADS`` KV heads: grid ``(R / BLOCK_R, KVH / HEADS)``."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = row < rows
    dims = tl.arange(0, BLOCK_D)
    held = valid[:, None] & (dims < HEAD_DIM)[None, :]
    position = tl.load(row_positions + row, mask=valid, other=0)
    request = tl.load(row_requests + row, mask=valid, other=0)
    place = places(position, valid, table, width, block_stride, token_stride, request, HEAD_DIM=HEAD_DIM, PAGE=PAGE)
    score = tl.zeros([BLOCK_R], tl.float32)
    for index in range(HEADS):
        head = tl.program_id(1) * HEADS + index
        key_at, value_at = origin(table, width, layer, head_stride, request, head, PAGE=PAGE, ALIGN=ALIGN)
        far = head.to(tl.int64)
        from_key = fresh_key + far * key_head_stride + row.to(tl.int64)[:, None] * key_row_stride + dims[None, :]
        from_value = (
            fresh_value + far * value_head_stride + row.to(tl.int64)[:, None] * value_row_stride + dims[None, :]
        )
        score += _replace(from_key, key + (key_at + place)[:, None] + dims[None, :], held, COMPARE_KEY)
        score += _replace(from_value, value + (value_at + place)[:, None] + dims[None, :], held, COMPARE_VALUE)
    if COMPARE_KEY or COMPARE_VALUE:
        tl.store(out + row, score, mask=valid)


def commit(
    key: Tensor,
    value: Tensor,
    memory: Memory,
    layer: int,
    batch: Batch,
    *,
    score: Literal["key", "value", "both"] | None = None,
) -> Tensor | None:
    """See :func:`blend.recompute.kernels.reference.commit`."""
    check_memory("key", key, memory, batch)
    check_like("value", value, key, 0, 1, 2)
    if key.shape[0] != memory.kv_heads:
        raise InvalidInput("key", tuple(key.shape), f"{memory.kv_heads} KV heads")
    if score not in (None, "key", "value", "both"):
        raise InvalidInput("score", score, "key, value, both, or none")
    kv_heads, rows, head_dim = key.shape
    key, value = aligned(key), aligned(value)
    where = memory.addresses(layer)
    out = torch.empty(rows if score else 0, dtype=torch.float32, device=key.device)
    wide = padded(head_dim)
    block = 4096 // wide
    heads = kv_heads if score else 1
    launch(
        _commit,
        (triton.cdiv(rows, block), kv_heads // heads),
        key,
        value,
        *where.arguments,
        batch.row_positions,
        batch.row_requests,
        out,
        rows,
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=wide,
        BLOCK_R=block,
        PAGE=where.page,
        ALIGN=16 // key.element_size(),
        COMPARE_KEY=score in ("key", "both"),
        COMPARE_VALUE=score in ("value", "both"),
        num_warps=4,
    )
    return out if score else None

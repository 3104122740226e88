"""Attention of rows at any positions over keys and values of several requests, in one launch.

One program computes a tile: up to ``BLOCK_M`` pairs (row, head of one group), so that a K/V tile that was read once
serves all heads that share it. It walks over blocks of ``BLOCK_N`` keys with an online softmax (Dao et al.,
"FlashAttention", 2022), from where the first row's window begins to the last row's position and no further. Keys
that every row of the tile reads go through without a mask; only blocks around the rows' own positions, and around
the windows' beginnings, are masked. Which program does what is planned on the host
(:class:`~blend.recompute.kernels.batch.Batch`), longest first.

Where there are too few tiles to keep the device busy, as in decoding, a tile's keys are split over several programs
(split-K, as in Flash-Decoding), which leave partial results in float32 and the logarithms of their sums; a second
kernel merges them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.checks import aligned, check_attend, padded, scaling
from blend.recompute.kernels.device import LOWEST, bend, multiply, origin, places, readable
from blend.recompute.kernels.fit import shape
from blend.recompute.kernels.launch import architecture, launch
from blend.recompute.kernels.memory import Memory

MERGE_ROWS = 16


@triton.jit
def _sweep(
    total: tl.tensor,
    weight: tl.tensor,
    peak: tl.tensor,
    query: tl.tensor,
    own: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    width: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    request: tl.tensor,
    visible: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Adds keys from ``low`` to ``high`` to a tile's running sum, sum of weights, and maximum.

    Without ``MASKED`` the range holds whole blocks that every row reads to the last key.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < high
        place = places(keys, inside, table, width, block_stride, token_stride, request, HEAD_DIM=HEAD_DIM, PAGE=PAGE)
        spot = place[:, None] + dims[None, :]
        if MASKED:
            held = inside[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(key + spot, mask=held, other=0.0)
        elif BLOCK_D > HEAD_DIM:
            k = tl.load(key + spot, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(key + spot)
        scores = multiply(query, tl.trans(k), tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        scores = bend(scores, inner, outer, SOFTCAP)
        if MASKED:
            seen = readable(keys, own, window, visible, WINDOW, VISIBLE, high)
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        share = tl.exp2(scores - new[:, None])
        fade = tl.exp2(peak - new)
        weight = weight * fade + tl.sum(share, 1)
        total = total * fade[:, None]
        if MASKED:
            held = inside[:, None] & (dims < HEAD_DIM)[None, :]
            v = tl.load(value + spot, mask=held, other=0.0)
        elif BLOCK_D > HEAD_DIM:
            v = tl.load(value + spot, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(value + spot)
        total = multiply(share.to(v.dtype), v, total)
        peak = new
    return total, weight, peak


@triton.jit(do_not_specialize=["layer", "window"])
def _attend(
    query: tl.tensor,
    out: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    width: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    pieces: tl.tensor,
    row_positions: tl.tensor,
    row_starts: tl.tensor,
    visible: tl.tensor,
    visible_starts: tl.tensor,
    partial: tl.tensor,
    partial_weight: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    heads: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
    VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One piece of work and one KV head: grid ``(W, KVH)``.

    Scores are kept in powers of two: ``inner`` and ``outer`` hold the factor log2(e).
    """
    head = tl.program_id(1)
    piece = pieces + tl.program_id(0) * 8
    request = tl.load(piece)
    pair = tl.load(piece + 1) + tl.arange(0, BLOCK_M)
    valid = pair < tl.load(piece + 2)
    low = tl.multiple_of(tl.load(piece + 3), BLOCK_N)
    high = tl.load(piece + 4)
    open_low = tl.multiple_of(tl.load(piece + 5), BLOCK_N)
    open_high = tl.multiple_of(tl.load(piece + 6), BLOCK_N)
    row = tl.load(row_starts + request) + pair // GROUP
    member = head * GROUP + pair % GROUP
    own = tl.load(row_positions + row, mask=valid, other=0)
    dims = tl.arange(0, BLOCK_D)
    held = valid[:, None] & (dims < HEAD_DIM)[None, :]
    spot = row.to(tl.int64) * query_row_stride + member.to(tl.int64) * query_head_stride
    q = tl.load(query + spot[:, None] + dims[None, :], mask=held, other=0.0)

    key_at, value_at = origin(table, width, layer, head_stride, request, head, PAGE=PAGE, ALIGN=ALIGN)
    key += key_at
    value += value_at
    if VISIBLE:
        visible += tl.load(visible_starts + request)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    if WINDOW:
        total, weight, peak = _sweep(
            total, weight, peak, q, own, low, open_low,
            key, value, table, width, block_stride, token_stride, request, visible, window, inner, outer,
            HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, WINDOW, VISIBLE, SOFTCAP, MASKED=True,
        )  # fmt: skip
    if not VISIBLE:
        total, weight, peak = _sweep(
            total, weight, peak, q, own, open_low, open_high,
            key, value, table, width, block_stride, token_stride, request, visible, window, inner, outer,
            HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, WINDOW, VISIBLE, SOFTCAP, MASKED=False,
        )  # fmt: skip
    total, weight, peak = _sweep(
        total, weight, peak, q, own, open_high, high,
        key, value, table, width, block_stride, token_stride, request, visible, window, inner, outer,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, WINDOW, VISIBLE, SOFTCAP, MASKED=True,
    )  # fmt: skip

    total = total / tl.where(weight > 0, weight, 1.0)[:, None]
    spot = (row.to(tl.int64) * heads + member) * HEAD_DIM
    if SPLIT:
        slot = tl.load(piece + 7)
        if slot >= 0:
            lane = (slot.to(tl.int64) * tl.num_programs(1) + head) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_weight + lane, peak + tl.log2(weight))
            tl.store(partial + lane[:, None] * HEAD_DIM + dims[None, :], total, mask=held)
        else:
            tl.store(out + spot[:, None] + dims[None, :], total.to(out.dtype.element_ty), mask=held)
    else:
        tl.store(out + spot[:, None] + dims[None, :], total.to(out.dtype.element_ty), mask=held)


@triton.jit
def _merge(
    out: tl.tensor,
    partial: tl.tensor,
    partial_weight: tl.tensor,
    merges: tl.tensor,
    parts: tl.tensor,
    row_starts: tl.tensor,
    heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` pairs of one tile whose keys were split, and one KV head: grid ``(X, KVH, BLOCK_M / ROWS)``."""
    head = tl.program_id(1)
    tile = merges + tl.program_id(0) * 4
    request = tl.load(tile)
    lane = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(tile + 1) + lane
    valid = pair < tl.load(tile + 2)
    first = tl.load(tile + 3).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    held = valid[:, None] & (dims < HEAD_DIM)[None, :]
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    for part in range(tl.load(parts + tl.program_id(0))):
        at = ((first + part) * tl.num_programs(1) + head) * BLOCK_M + lane
        own = tl.load(partial_weight + at, mask=valid, other=float("-inf"))
        result = tl.load(partial + at[:, None] * HEAD_DIM + dims[None, :], mask=held, other=0.0)
        new = tl.maximum(peak, own)
        share = tl.exp2(own - new)
        fade = tl.exp2(peak - new)
        total = total * fade[:, None] + result * share[:, None]
        weight = weight * fade + share
        peak = new
    total = total / tl.where(weight > 0, weight, 1.0)[:, None]
    row = tl.load(row_starts + request) + pair // GROUP
    spot = (row.to(tl.int64) * heads + head * GROUP + pair % GROUP) * HEAD_DIM
    tl.store(out + spot[:, None] + dims[None, :], total.to(out.dtype.element_ty), mask=held)


def attend(
    query: Tensor,
    memory: Memory,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See :func:`blend.recompute.kernels.reference.attend`."""
    group = check_attend(query, memory, batch, window)
    heads, rows, head_dim = query.shape
    kv_heads = memory.kv_heads
    largest = max(len(at) for at in batch.positions)
    block_m, block_n, warps, stages = shape(head_dim, query.dtype, largest * group, architecture(query.device))
    work = batch.work(kv_heads, group, block_m, block_n, window)
    query = aligned(query)
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    partial = out.new_empty((work.partials, kv_heads, block_m, head_dim), dtype=torch.float32)
    partial_weight = out.new_empty((work.partials, kv_heads, block_m), dtype=torch.float32)
    where = memory.addresses(layer)
    visible, visible_starts = batch.visibility or (batch.row_starts, batch.row_starts)
    inner, outer = scaling(scale, softcap)
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": block_m}
    launch(
        _attend,
        (len(work.pieces), kv_heads),
        query,
        out,
        *where.arguments,
        work.pieces,
        batch.row_positions,
        batch.row_starts,
        visible,
        visible_starts,
        partial,
        partial_weight,
        query.stride(0),
        query.stride(1),
        heads,
        window or 0,
        inner,
        outer,
        **constants,
        BLOCK_N=block_n,
        PAGE=where.page,
        ALIGN=16 // query.element_size(),
        WINDOW=window is not None,
        VISIBLE=batch.visibility is not None,
        SOFTCAP=softcap is not None,
        SPLIT=work.partials > 0,
        num_warps=warps,
        num_stages=stages,
    )
    launch(
        _merge,
        (len(work.merges), kv_heads, block_m // MERGE_ROWS),
        out,
        partial,
        partial_weight,
        work.merges,
        work.parts,
        batch.row_starts,
        heads,
        **constants,
        ROWS=MERGE_ROWS,
        num_warps=4,
    )
    return out.transpose(0, 1)

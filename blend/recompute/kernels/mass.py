"""The attention mass that a request's rows put on each of its keys, without ever holding the scores.

Two passes, each of which reads every key once. The first leaves, for each row and block of keys, the logarithm of
its exponentials' sum (the statistics of an online softmax); over all blocks these make each row's normalizer. The
second computes the scores again, normalizes them, and sums them over rows and the heads of a group. The result is
the same from run to run: nothing is added up by atomics.

Both passes run one program for a block of keys and a KV head, which holds its keys on the chip while it walks over
the pairs (row, head of the group). Keys behind the last row are passed over.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.checks import (
    aligned,
    check_group,
    check_like,
    check_numbers,
    check_positions,
    check_window,
    padded,
    scaling,
)
from blend.recompute.kernels.device import LOG2E, LOWEST, bend, multiply, readable
from blend.recompute.kernels.launch import launch

ROWS = 512
"""Rows of one round: bounds the scratch memory to ``H × 512 × N / BLOCK_N`` numbers."""


@triton.jit
def _keys(
    key: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """This program's keys ``[BLOCK_N]`` and their contents ``[BLOCK_N, BLOCK_D]``."""
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    spot = tl.program_id(1).to(tl.int64) * head_stride + keys.to(tl.int64) * token_stride
    held = (keys < length)[:, None] & (dims < HEAD_DIM)[None, :]
    return keys, tl.load(key + spot[:, None] + dims[None, :], mask=held, other=0.0)


@triton.jit
def _scores(
    query: tl.tensor,
    positions: tl.tensor,
    start: tl.tensor,
    pairs: tl.tensor,
    keys: tl.tensor,
    k: tl.tensor,
    length: tl.tensor,
    visible: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> Any:
    """Pairs from ``start`` on, which of them there are, and their scores, minus infinity where a key is not read."""
    pair = start + tl.arange(0, BLOCK_M)
    valid = pair < pairs
    row = pair // GROUP
    member = tl.program_id(1) * GROUP + pair % GROUP
    dims = tl.arange(0, BLOCK_D)
    spot = row.to(tl.int64) * query_row_stride + member.to(tl.int64) * query_head_stride
    held = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + spot[:, None] + dims[None, :], mask=held, other=0.0)
    own = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
    scores = multiply(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    scores = bend(scores, inner, outer, SOFTCAP)
    seen = readable(keys, own, window, visible, WINDOW, VISIBLE, length)
    return pair, valid, tl.where(seen & valid[:, None], scores, float("-inf"))


@triton.jit(do_not_specialize=["pairs", "length", "window"])
def _weigh(
    query: tl.tensor,
    key: tl.tensor,
    positions: tl.tensor,
    visible: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    length: tl.tensor,
    key_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """First pass: into ``weights`` ``[KVH, blocks, pairs]`` the natural logarithm of each block's exponentials."""
    keys, k = _keys(key, key_head_stride, key_token_stride, length, HEAD_DIM, BLOCK_D, BLOCK_N)
    weights += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * pairs
    for start in range(0, pairs, BLOCK_M):
        pair, valid, scores = _scores(
            query, positions, start, pairs, keys, k, length, visible, query_head_stride, query_row_stride,
            window, inner, outer, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, VISIBLE, SOFTCAP,
        )  # fmt: skip
        peak = tl.maximum(tl.max(scores, 1), LOWEST)
        weight = peak + tl.log2(tl.sum(tl.exp2(scores - peak[:, None]), 1))
        tl.store(weights + pair, weight / LOG2E, mask=valid)


@triton.jit(do_not_specialize=["pairs", "length", "window"])
def _collect(
    query: tl.tensor,
    key: tl.tensor,
    positions: tl.tensor,
    visible: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    pairs: tl.tensor,
    length: tl.tensor,
    key_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Second pass: the mass into ``out`` ``[KVH, N]``, by normalizers ``weights`` ``[KVH, pairs]``; ``ADD``: on top."""
    keys, k = _keys(key, key_head_stride, key_token_stride, length, HEAD_DIM, BLOCK_D, BLOCK_N)
    last = tl.load(positions + (pairs // GROUP - 1))
    stop = tl.where(tl.program_id(0) * BLOCK_N <= last, pairs, 0)
    mass = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, stop, BLOCK_M):
        pair, valid, scores = _scores(
            query, positions, start, pairs, keys, k, length, visible, query_head_stride, query_row_stride,
            window, inner, outer, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, VISIBLE, SOFTCAP,
        )  # fmt: skip
        weight = tl.load(weights + tl.program_id(1).to(tl.int64) * pairs + pair, mask=valid, other=0.0) * LOG2E
        mass += tl.sum(tl.exp2(scores - weight[:, None]), 0)
    out += tl.program_id(1).to(tl.int64) * length + keys
    if ADD:
        mass += tl.load(out, mask=keys < length, other=0.0)
    tl.store(out, mass, mask=keys < length)


def mass(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """See :func:`blend.recompute.kernels.reference.mass`."""
    check_numbers("query", query, 3)
    check_like("key", key, query, 2)
    check_positions("positions", positions, query.shape[1], query.device)
    check_window(window)
    kv_heads, length, head_dim = key.shape
    group = check_group(query, kv_heads)
    if visible is not None and (tuple(visible.shape), visible.dtype, visible.device) != (
        (length,),
        torch.bool,
        key.device,
    ):
        raise InvalidInput("visible", (tuple(visible.shape), visible.dtype), f"[{length}] bool on {key.device}")
    query, key = aligned(query), aligned(key)
    inner, outer = scaling(scale, softcap)
    wide = padded(head_dim)
    single = query.dtype == torch.float32
    block_m, block_n, warps = (32, 32, 4) if single else (64, 64, 4) if wide <= 128 else (32, 64, 4)
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": wide,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "WINDOW": window is not None,
        "VISIBLE": visible is not None,
        "SOFTCAP": softcap is not None,
        "num_warps": warps,
        "num_stages": 2,
    }
    shown = positions if visible is None else visible.view(torch.uint8)
    blocks = triton.cdiv(length, block_n)
    out = torch.zeros((kv_heads, length), dtype=torch.float32, device=key.device)
    for start in range(0, query.shape[1], ROWS):
        rows, own = query[:, start : start + ROWS], positions[start : start + ROWS]
        pairs = len(own) * group
        strides = (key.stride(0), key.stride(1), rows.stride(0), rows.stride(1))
        weights = out.new_empty((kv_heads, blocks, pairs))
        launch(
            _weigh, (blocks, kv_heads), rows, key, own, shown, weights, pairs, length,
            *strides, window or 0, inner, outer, **constants,
        )  # fmt: skip
        normal = weights.logsumexp(1)
        launch(
            _collect, (blocks, kv_heads), rows, key, own, shown, normal, out, pairs, length,
            *strides, window or 0, inner, outer, ADD=start > 0, **constants,
        )  # fmt: skip
    return out.sum(0)

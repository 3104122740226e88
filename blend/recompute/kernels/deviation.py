"""How far fresh keys or values lie from cached ones, per token, in one pass without temporaries.

One program takes a block of tokens and walks over the heads, so that every number is read once and nothing is added
up by atomics. The cached side may be a whole canvas, read at the tokens' positions: no gather goes before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend.recompute.kernels.checks import aligned, both, check_like, check_numbers, check_positions, padded
from blend.recompute.kernels.launch import launch


@triton.jit
def _distance(
    fresh: tl.tensor,
    cached: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
    valid: tl.tensor,
    heads: tl.tensor,
    fresh_head_stride: tl.tensor,
    fresh_token_stride: tl.tensor,
    cached_head_stride: tl.tensor,
    cached_token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> Any:
    """``[BLOCK_T]``: the squared distance of fresh tokens from cached ones, over all heads."""
    dims = tl.arange(0, BLOCK_D)
    held = valid[:, None] & (dims < HEAD_DIM)[None, :]
    fresh += token.to(tl.int64)[:, None] * fresh_token_stride + dims[None, :]
    cached += place.to(tl.int64)[:, None] * cached_token_stride + dims[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for _ in range(heads):
        a = tl.load(fresh, mask=held, other=0.0).to(tl.float32)
        b = tl.load(cached, mask=held, other=0.0).to(tl.float32)
        total += (a - b) * (a - b)
        fresh += fresh_head_stride
        cached += cached_head_stride
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["tokens"])
def _deviation(
    fresh: tl.tensor,
    cached: tl.tensor,
    other_fresh: tl.tensor,
    other_cached: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    fresh_head_stride: tl.tensor,
    fresh_token_stride: tl.tensor,
    cached_head_stride: tl.tensor,
    cached_token_stride: tl.tensor,
    other_fresh_head_stride: tl.tensor,
    other_fresh_token_stride: tl.tensor,
    other_cached_head_stride: tl.tensor,
    other_cached_token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PLACED: tl.constexpr,
    BOTH: tl.constexpr,
) -> None:
    """One block of tokens: grid ``(T / BLOCK_T,)``. ``PLACED``: cached ones stand at ``positions``."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < tokens
    place = token
    if PLACED:
        place = tl.load(positions + token, mask=valid, other=0)
    found = _distance(
        fresh, cached, token, place, valid, heads, fresh_head_stride, fresh_token_stride,
        cached_head_stride, cached_token_stride, HEAD_DIM, BLOCK_D, BLOCK_T,
    )  # fmt: skip
    if BOTH:
        found += _distance(
            other_fresh, other_cached, token, place, valid, heads, other_fresh_head_stride, other_fresh_token_stride,
            other_cached_head_stride, other_cached_token_stride, HEAD_DIM, BLOCK_D, BLOCK_T,
        )  # fmt: skip
    tl.store(out + token, found, mask=valid)


def deviation(
    fresh: Tensor | tuple[Tensor, Tensor],
    cached: Tensor | tuple[Tensor, Tensor],
    positions: Tensor | None = None,
) -> Tensor:
    """See :func:`blend.recompute.kernels.reference.deviation`."""
    pairs = list(zip(both(fresh), both(cached), strict=True))
    ready = []
    for a, b in pairs:
        check_numbers("fresh", a, 3)
        check_like("cached", b, a, 0, 2, *(() if positions is not None else (1,)))
        check_like("fresh", a, pairs[0][0], 0, 1, 2)
        ready.append((aligned(a), aligned(b)))
    heads, tokens, head_dim = ready[0][0].shape
    if positions is not None:
        check_positions("positions", positions, tokens, ready[0][0].device)
    out = torch.empty(tokens, dtype=torch.float32, device=ready[0][0].device)
    wide = padded(head_dim)
    block = max(1, 4096 // wide)
    (a, b), (c, d) = ready[0], ready[-1]
    launch(
        _deviation,
        (triton.cdiv(tokens, block),),
        a,
        b,
        c,
        d,
        out if positions is None else positions,
        out,
        tokens,
        heads,
        *(step for tensor in (a, b, c, d) for step in tensor.stride()[:2]),
        HEAD_DIM=head_dim,
        BLOCK_D=wide,
        BLOCK_T=block,
        PLACED=positions is not None,
        BOTH=len(ready) == 2,
        num_warps=8 if wide > 64 else 4,  # with 4 wide heads do not fit the registers
    )
    return out

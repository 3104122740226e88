"""What the Triton kernels share: finding keys and values, and products that are exact in float32.

In every kernel ``table``, ``width``, ``layer``, ``block_stride``, ``token_stride`` and ``head_stride`` are those of
:class:`~blend.recompute.kernels.memory.Addresses`; ``PAGE`` is the block size, 0 for canvases, and ``ALIGN`` how many
numbers 16 bytes hold, to which every row of D numbers is aligned.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Where running maxima begin: finite, so that a row which has read no key yet brings no NaN."""


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> Any:
    """``total + a @ b`` in float32. Float32 factors are multiplied as such, not as TF32."""
    if INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def origin(
    table: tl.tensor,
    width: tl.tensor,
    layer: tl.tensor,
    head_stride: tl.tensor,
    request: tl.tensor,
    head: tl.tensor,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
) -> Any:
    """Where a head's keys and its values begin, in numbers from the base tensors; in pages: from any block's start."""
    if PAGE > 0:
        key = head.to(tl.int64) * head_stride
        value = key
    else:
        entry = table + request.to(tl.int64) * width
        inner = tl.load(entry + 2) * layer + tl.load(entry + 3) * head
        key = tl.load(entry) + inner
        value = tl.load(entry + 1) + inner
    return tl.multiple_of(key, ALIGN), tl.multiple_of(value, ALIGN)


@triton.jit
def places(
    positions: tl.tensor,
    valid: tl.tensor,
    table: tl.tensor,
    width: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    request: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
) -> Any:
    """Distance of each position from :func:`origin`, below 2**31 in a canvas; in pages it may be more."""
    if PAGE > 0:
        entry = table + request.to(tl.int64) * width
        block = tl.load(entry + positions // PAGE, mask=valid, other=0)
        return block.to(tl.int64) * block_stride + (positions % PAGE).to(tl.int64) * token_stride
    else:
        return positions * HEAD_DIM


@triton.jit
def bend(scores: tl.tensor, inner: tl.tensor, outer: tl.tensor, SOFTCAP: tl.constexpr) -> Any:
    """Scores times ``inner``; with a soft-cap ``outer * tanh(scores * inner / (2 * log2(e)))``, by one exponential."""
    if SOFTCAP:
        return outer * (1.0 - 2.0 / (tl.exp2(scores * inner) + 1.0))
    else:
        return scores * inner


@triton.jit
def readable(
    keys: tl.tensor,
    own: tl.tensor,
    window: tl.tensor,
    visible: tl.tensor,
    WINDOW: tl.constexpr,
    VISIBLE: tl.constexpr,
    stop: tl.tensor,
) -> Any:
    """``[M, N]`` bool: which of the ``keys`` ``[N]`` below ``stop`` the rows at ``own`` ``[M]`` may read.

    ``visible`` points at the first position's byte of the request's mask.
    """
    seen = (keys[None, :] <= own[:, None]) & (keys < stop)[None, :]
    if WINDOW:
        seen &= keys[None, :] > own[:, None] - window
    if VISIBLE:
        shown = tl.load(visible + keys, mask=keys < stop, other=0) != 0
        seen &= shown[None, :] | (keys[None, :] == own[:, None])
    return seen

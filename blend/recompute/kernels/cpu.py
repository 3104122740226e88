"""Placing chunks on a canvas on the CPU, compiled by numba: each byte read once and written once.

In plain torch a turn takes up to eight passes over float32 copies of the keys, which is most of what filling a canvas
costs. float16, which is rare on CPUs, is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

Array = npt.NDArray[np.float32 | np.uint16]
"""What numba works on. It has no bfloat16, and sees the bits of one."""

_SEEN = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether :func:`place` can fill canvases of this dtype and device."""
    return device.type == "cpu" and dtype in _SEEN


def array(tensor: Tensor) -> Array:
    """A tensor of a supported dtype as a view of its memory."""
    seen: Array = tensor.view(_SEEN[tensor.dtype]).numpy()
    return seen


def place(
    k: Array,
    v: Array,
    layer: int,
    kv: Array,
    start: int,
    tokens: int,
    table: npt.NDArray[np.float32],
    *,
    interleaved: bool,
) -> None:
    """Write one layer of a chunk to a canvas: keys turned in float32 and rounded once, values as they are.

    Args:
        k, v: ``[L, KVH, N, D]``, the canvas; positions ``start`` up to ``start + tokens`` of ``layer`` are written.
        kv: ``[2, KVH, T, D]``, keys then values, T at least ``tokens``. As these, contiguous: anything else would be
            compiled anew.
        table: ``[2, P]``, cosines then sines; 2P dimensions turn, the others are copied.
        interleaved: pairs are 2i with 2i + 1, else i with i + P.
    """
    (_place_interleaved if interleaved else _place_halves)(k, v, layer, kv, start, tokens, table)


def warm_up(dtype: torch.dtype) -> None:
    """Compile what is not compiled yet: some seconds once on a machine, which no request should wait for."""
    k, v, kv = (array(torch.zeros(shape, dtype=dtype)) for shape in ((1, 1, 1, 2), (1, 1, 1, 2), (2, 1, 1, 2)))
    for interleaved in (False, True):
        place(k, v, 0, kv, 0, 1, np.zeros((2, 1), np.float32), interleaved=interleaved)


def _compiled(function: Callable[..., None]) -> Any:
    """Compile when first called; remember the result across processes where there is a place for it."""
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False, fastmath={"contract"})(function)
    except RuntimeError:  # neither beside this file nor in the user's cache
        return numba.njit(nogil=True, boundscheck=False)(function)


def _wide(stored: Any) -> Any:
    """A stored number as float32."""


def _narrow(value: Any, like: Any) -> Any:
    """The float32 ``value`` as a number is stored that is ``like`` this one.

    As bfloat16 it is rounded to nearest, ties to even. A NaN that comes of bfloat16 ends in zeros, and so stays one.
    """


def _wide_bits(stored: Any) -> Any:
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


def _narrow_bits(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    half = np.uint32(0x7FFF + (np.uint32(bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(np.uint32(bits + half) >> np.uint32(16))


def _wide_float(stored: Any) -> Any:
    return stored


def _narrow_float(value: Any, like: Any) -> Any:
    return np.float32(value)


@overload(_wide, inline="always")
def _overload_wide(stored: Any) -> Any:
    return _wide_bits if isinstance(stored, types.Integer) else _wide_float


@overload(_narrow, inline="always")
def _overload_narrow(value: Any, like: Any) -> Any:
    return _narrow_bits if isinstance(like, types.Integer) else _narrow_float


@_compiled
def _place_halves(k: Any, v: Any, layer: int, kv: Any, start: int, tokens: int, table: Any) -> None:
    _, heads, _, dims = kv.shape
    cos, sin = table[0], table[1]
    pairs = len(cos)
    for head in range(heads):
        v[layer, head, start : start + tokens] = kv[1, head, :tokens]
        for token in range(tokens):
            keys, out = kv[0, head, token], k[layer, head, start + token]
            for pair in range(pairs):
                x, y = _wide(keys[pair]), _wide(keys[pair + pairs])
                out[pair] = _narrow(x * cos[pair] - y * sin[pair], keys[pair])
                out[pair + pairs] = _narrow(y * cos[pair] + x * sin[pair], keys[pair])
            for dim in range(2 * pairs, dims):
                out[dim] = keys[dim]


@_compiled
def _place_interleaved(k: Any, v: Any, layer: int, kv: Any, start: int, tokens: int, table: Any) -> None:
    _, heads, _, dims = kv.shape
    cos, sin = table[0], table[1]
    pairs = len(cos)
    for head in range(heads):
        v[layer, head, start : start + tokens] = kv[1, head, :tokens]
        for token in range(tokens):
            keys, out = kv[0, head, token], k[layer, head, start + token]
            for pair in range(pairs):
                x, y = _wide(keys[2 * pair]), _wide(keys[2 * pair + 1])
                out[2 * pair] = _narrow(x * cos[pair] - y * sin[pair], keys[pair])
                out[2 * pair + 1] = _narrow(y * cos[pair] + x * sin[pair], keys[pair])
            for dim in range(2 * pairs, dims):
                out[dim] = keys[dim]

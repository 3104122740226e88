"""Placing chunks on a canvas on the CPU, compiled by numba: each byte read once and written once.

In plain torch a turn takes up to eight passes over float32 copies of the keys, which is most of what filling a canvas
costs. float16, which is rare on CPUs, is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from blend.errors import InvalidInput
from blend.helper import Helper

Array = npt.NDArray[np.float32 | np.uint16]
"""What numba works on. It has no bfloat16, and sees the bits of one."""

_SHARED_NBYTES = 1 << 22
"""Least of one layer, in bytes, that is worth waking another thread for. With 2 MB two threads were no faster than one,
with 10 MB 1.4 times as fast."""

_SEEN = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a :class:`Placement` can fill canvases of this dtype and device."""
    return device.type == "cpu" and dtype in _SEEN


def _array(tensor: Tensor) -> Array:
    seen: Array = tensor.view(_SEEN[tensor.dtype]).numpy()
    return seen


class Placement:
    """Where chunks go on a canvas, and by how much their keys turn. Memory is read by address: all is checked first.

    Args:
        k, v: the canvas, ``[L, KVH, N, D]``, contiguous, of a supported dtype.
        spans: for each chunk the position of the first token that is placed, how many are, and which of the chunk's
            tokens that first one is.
        helper: a thread that takes part of them.

    Raises:
        InvalidInput: they are not.
    """

    def __init__(
        self, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int, int]], helper: Helper | None = None
    ) -> None:
        for name, tensor in (("k", k), ("v", v)):
            if tensor.ndim != 4 or not tensor.is_contiguous() or not supports(tensor.dtype, tensor.device):
                what = (tuple(tensor.shape), tensor.dtype, tensor.device)
                raise InvalidInput(name, what, "[L, KVH, N, D], contiguous, float32 or bfloat16 on the CPU")
        if k.shape != v.shape or k.dtype != v.dtype:
            raise InvalidInput("v", (tuple(v.shape), v.dtype), f"as k: {tuple(k.shape)}, {k.dtype}")
        self._canvas = (k, v)
        self._arrays = (_array(k), _array(v))
        self._pieces = np.array([(0, 0, start, tokens, 0) for start, tokens, _ in spans], np.int64).reshape(-1, 5)
        self._firsts = [first for _, _, first in spans]
        for number, (start, tokens, first) in enumerate(spans):
            if start < 0 or tokens < 0 or start + tokens > k.shape[2]:
                raise InvalidInput(f"spans[{number}]", (start, tokens), f"within the canvas of {k.shape[2]} positions")
            if first < 0:
                raise InvalidInput(f"spans[{number}]", first, "a first token of 0 or more")
        half = _half([tokens for _, tokens, _ in spans])
        self._parts = [slice(half), slice(half, None)]
        self._helper = helper if 0 < half < len(spans) else None

    def place(self, layer: int, kv: Sequence[Tensor], tables: Tables) -> None:
        """Write one layer of every chunk: keys turned in float32 and rounded once, values as they are.

        Args:
            layer: which layer.
            kv: for each chunk ``[2, KVH, T, D]``, keys then values, contiguous, in the canvas's dtype, T at least the
                first token that is placed and as many as are.
            tables: how keys turn in this layer.

        Raises:
            InvalidInput: a tensor is none of these, or there is no such layer.
        """
        k, _ = self._canvas
        if not 0 <= layer < k.shape[0]:
            raise InvalidInput("layer", layer, f"0 to {k.shape[0] - 1}")
        kv = tuple(kv)  # their addresses are used below, when nothing else may hold them
        if len(kv) != len(self._pieces):
            raise InvalidInput("kv", f"{len(kv)} tensors", f"one for each of the {len(self._pieces)} pieces")
        _, heads, _, dims = k.shape
        pieces, entries = self._pieces, []
        tables.check(len(pieces), dims)
        for stored, first, tokens in zip(kv, self._firsts, pieces[:, 3].tolist(), strict=True):
            shape = stored.shape
            held = shape[2] if len(shape) == 4 else -1
            if held < first + tokens or (shape[0], shape[1], shape[3]) != (2, heads, dims):
                raise InvalidInput("kv", tuple(stored.shape), f"(2, {heads}, {first + tokens} or more, {dims})")
            if stored.dtype != k.dtype or not stored.is_contiguous() or stored.device != k.device:
                raise InvalidInput("kv", f"{stored.dtype}, {stored.device}", f"contiguous {k.dtype} on {k.device}")
            # From there on tokens lie as they do from the chunk's own first one.
            entries.append((stored.data_ptr() + first * dims * stored.element_size(), held))
        pieces[:, :2] = np.array(entries, np.int64).reshape(-1, 2)
        pieces[:, 4] = tables.turned

        def part(which: slice, held: Sequence[Tensor] = kv) -> None:  # whoever runs it holds what it reads by address
            _place(*self._arrays, layer, pieces[which], tables.angles[which], tables.interleaved)

        if self._helper is None or sum(stored.nbytes for stored in kv) < _SHARED_NBYTES:
            part(slice(None))
        else:
            self._helper.each(part, self._parts)


def _half(sizes: Sequence[int]) -> int:
    """Return how many of them come nearest to half of their sum."""
    sums = np.cumsum([0, *sizes])
    return int(np.abs(2 * sums - sums[-1]).argmin())


@dataclass(frozen=True)
class Tables:
    """How the keys of each chunk of a request turn in layers that turn alike.

    ``angles`` is ``[C, 2, P]``, cosines then sines of each chunk: 2P dimensions turn, the others are copied.
    ``turned`` is ``[C]``, whether the chunk's keys turn at all. ``interleaved``: pairs are 2i with 2i + 1, else i
    with i + P.
    """

    angles: npt.NDArray[np.float32]
    turned: npt.NDArray[np.bool_]
    interleaved: bool = False

    def check(self, pieces: int, dims: int) -> None:
        """Raise :class:`InvalidInput` unless these are for so many pieces, and for heads of so many dimensions."""
        shape, pairs = self.angles.shape, self.angles.shape[-1]
        if shape != (pieces, 2, pairs) or 2 * pairs > dims or self.angles.dtype != np.float32:
            raise InvalidInput(
                "angles", (shape, str(self.angles.dtype)), f"({pieces}, 2, {dims // 2} or fewer), float32"
            )
        if self.turned.shape != (pieces,):
            raise InvalidInput("turned", self.turned.shape, f"({pieces},)")


def warm_up(dtype: torch.dtype) -> None:
    """Compile what is not compiled yet: some seconds once on a machine, which no request should wait for."""
    k, v, kv = (torch.zeros(shape, dtype=dtype) for shape in ((1, 1, 1, 2), (1, 1, 1, 2), (2, 1, 1, 2)))
    Placement(k, v, [(0, 1, 0)]).place(0, [kv], Tables(np.zeros((1, 2, 1), np.float32), np.ones(1, np.bool_)))


def _compiled(function: Callable[..., None]) -> Any:
    """Compile when first called; remember the result across processes where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "fastmath": {"contract"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache
        return numba.njit(**options)(function)


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


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers as those of the array ``like``, from an address."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@_compiled
def _place(k: Any, v: Any, layer: int, pieces: Any, angles: Any, interleaved: bool) -> None:
    heads, dims = k.shape[1], k.shape[3]
    pairs = angles.shape[2]
    for piece in range(len(pieces)):
        start, tokens, turned = pieces[piece, 2], pieces[piece, 3], pieces[piece, 4] != 0
        kv = numba.carray(_pointer(pieces[piece, 0], k), (2, heads, pieces[piece, 1], dims))
        cos, sin = angles[piece, 0], angles[piece, 1]
        still = 2 * pairs if turned else 0
        for head in range(heads):
            for token in range(tokens):
                values, out = kv[1, head, token], v[layer, head, start + token]
                for dim in range(dims):
                    out[dim] = values[dim]
            for token in range(tokens):
                keys, out = kv[0, head, token], k[layer, head, start + token]
                if turned and interleaved:
                    for pair in range(pairs):
                        x, y = _wide(keys[2 * pair]), _wide(keys[2 * pair + 1])
                        out[2 * pair] = _narrow(x * cos[pair] - y * sin[pair], keys[pair])
                        out[2 * pair + 1] = _narrow(y * cos[pair] + x * sin[pair], keys[pair])
                elif turned:
                    for pair in range(pairs):
                        x, y = _wide(keys[pair]), _wide(keys[pair + pairs])
                        out[pair] = _narrow(x * cos[pair] - y * sin[pair], keys[pair])
                        out[pair + pairs] = _narrow(y * cos[pair] + x * sin[pair], keys[pair])
                for dim in range(still, dims):
                    out[dim] = keys[dim]

"""One request's KV. Pure tensors: nothing of models is imported here, so that ``blend.model`` may use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kept import KEPT


class Canvas:
    """KV for every position of one request's prompt and answer, all layers.

    ``k`` and ``v`` are ``[L, KVH, N, D]`` and start as zeros, so that a position which nobody has written yet
    is finite under any mask. Keys are stored as the model hands them to attention, that is rotated.

    A canvas can be filled while it is used: see :meth:`fill_by`.

    Args:
        layers, kv_heads, length, head_dim: L, KVH, N and D, each 1 or more; else :class:`InvalidInput`.
        dtype, device: of both tensors.

    Attributes:
        fill_ms: milliseconds that filling has taken so far, waiting included.
    """

    __slots__ = ("_fill", "_filled", "fill_ms", "k", "v")

    k: Tensor
    v: Tensor

    def __init__(
        self, layers: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        for name, size in (("layers", layers), ("kv_heads", kv_heads), ("length", length), ("head_dim", head_dim)):
            if size < 1:
                raise InvalidInput(f"canvas.{name}", size, "1 or more")
        # A tensor made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            shape = (layers, kv_heads, length, head_dim)
            self.k = _zeros(shape, dtype, device)
            self.v = _zeros(shape, dtype, device)
        self.fill_ms = 0.0
        self._fill: Callable[[int], None] | None = None
        self._filled = 0

    def fill_by(self, fill: Callable[[int], None]) -> None:
        """Have ``fill(layer)`` called for each layer once, in order, before that layer is first read or written."""
        self._fill = fill
        self._filled = 0

    def need(self, layer: int) -> None:
        """Fill the layers up to and including ``layer`` that are not filled yet. What filling raises is passed on."""
        if self._fill is None:
            return
        begin = perf_counter()
        try:
            while self._filled <= layer:
                self._fill(self._filled)
                self._filled += 1
            if self._filled == self.layers:
                self._fill = None
        finally:
            self.fill_ms += (perf_counter() - begin) * 1e3

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return self.k.shape[0]

    @property
    def length(self) -> int:
        """N, the number of positions."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.k.nbytes + self.v.nbytes

    def __repr__(self) -> str:
        layers, kv_heads, length, head_dim = self.k.shape
        return f"Canvas(L={layers}, KVH={kv_heads}, N={length}, D={head_dim}, {self.k.dtype}, {self.k.device})"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on the CPU in memory of canvases that are gone, where there is some."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return KEPT.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

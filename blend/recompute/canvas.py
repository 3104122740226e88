"""One request's KV. Pure tensors: nothing of models is imported here, so that ``blend.model`` may use it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from blend.errors import InvalidInput


class Canvas:
    """KV for every position of one request's prompt and answer, all layers.

    ``k`` and ``v`` are ``[L, KVH, N, D]`` and start as zeros, so that a position which nobody has written yet
    is finite under any mask. Keys are stored as the model hands them to attention, that is rotated.

    Args:
        layers, kv_heads, length, head_dim: L, KVH, N and D, each 1 or more; else :class:`InvalidInput`.
        dtype, device: of both tensors.
    """

    __slots__ = ("k", "v")

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
    """Zeros. On the CPU from numpy, which leaves zeroing to the first touch and asks for huge pages: filling a canvas
    of a few hundred megabytes then takes a third of the time, page faults included."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)

"""Places stored chunks on a canvas, layer by layer: keys turned by one constant shift a chunk, values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.canvas import Canvas
from blend.recompute.kernels import cpu
from blend.recompute.rope import Rotation, Turn

_STILL = np.zeros((2, 0), np.float32)
"""The table of a layer that does not rotate."""


@dataclass(frozen=True)
class Piece:
    """A stored chunk's place on a canvas.

    Args:
        start: position of its first token on the canvas.
        tokens: how many of its tokens are placed, from the first one on.
        stored_at: position that its first token was computed at; keys turn by ``start - stored_at``.
    """

    start: int
    tokens: int
    stored_at: int

    @property
    def shift(self) -> int:
        """How many positions its keys turn by."""
        return self.start - self.stored_at


class Assembly:
    """Where all chunks of one request go. Angles are worked out once, and serve every layer that turns alike.

    Args:
        canvas: where to write, ``[L, KVH, N, D]``.
        pieces: one for each chunk.
        rotations: one for each layer, ``None`` for a layer that does not rotate (NoPE).
    """

    def __init__(self, canvas: Canvas, pieces: Sequence[Piece], rotations: Sequence[Rotation | None]) -> None:
        self.pieces = tuple(pieces)
        self._k, self._v = canvas.k, canvas.v  # not the canvas: it refers to what fills it
        self._rotations = tuple(rotations)
        self._turns: dict[tuple[int, int], Turn] = {}
        compiled = cpu.supports(canvas.k.dtype, canvas.k.device)
        self._arrays = (cpu.array(canvas.k), cpu.array(canvas.v)) if compiled else None

    def put(self, layer: int, kv: Sequence[Tensor]) -> None:
        """Write one layer of every chunk.

        Args:
            layer: which layer.
            kv: for each piece ``[2, KVH, T, D]`` in the canvas's dtype, contiguous, on any device: keys then values,
                T at least its ``tokens``.

        Raises:
            InvalidInput: not one tensor for each piece.
        """
        if len(kv) != len(self.pieces):
            raise InvalidInput("kv", f"{len(kv)} tensors", f"one for each of the {len(self.pieces)} pieces")
        for piece, stored in zip(self.pieces, kv, strict=True):
            turn = self._turn(layer, piece.shift)
            if self._arrays is None:
                self._copy(layer, piece, stored, turn)
            else:
                table, interleaved = (_STILL, False) if turn is None else (turn.table, turn.interleaved)
                kv_layer = cpu.array(stored)
                cpu.place(*self._arrays, layer, kv_layer, piece.start, piece.tokens, table, interleaved=interleaved)

    def _copy(self, layer: int, piece: Piece, stored: Tensor, turn: Turn | None) -> None:
        k, v = self._k[layer], self._v[layer]
        span = slice(piece.start, piece.start + piece.tokens)
        v[:, span].copy_(stored[1, :, : piece.tokens])
        keys = stored[0, :, : piece.tokens]
        if turn is None:
            k[:, span].copy_(keys)
        else:
            turn.into(keys.to(k.device), k[:, span])

    def _turn(self, layer: int, shift: int) -> Turn | None:
        rotation = self._rotations[layer]
        if rotation is None or shift == 0:
            return None
        key = id(rotation), shift
        if key not in self._turns:
            self._turns[key] = rotation.by(shift)
        return self._turns[key]


def prepare(dtype: torch.dtype, device: torch.device) -> None:
    """Compile what assembling canvases of this kind needs: once on a machine, and then not while a request waits."""
    if cpu.supports(dtype, device):
        cpu.warm_up(dtype)

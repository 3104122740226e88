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
        self._tables: dict[int, cpu.Tables] = {}
        self._placement: cpu.Placement | None = None
        if cpu.supports(canvas.k.dtype, canvas.k.device):
            self._placement = cpu.Placement(canvas.k, canvas.v, [(piece.start, piece.tokens) for piece in self.pieces])

    def put(self, layer: int, kv: Sequence[Tensor]) -> None:
        """Write one layer of every chunk.

        Args:
            layer: which layer.
            kv: for each piece ``[2, KVH, T, D]`` in the canvas's dtype, contiguous, on any device: keys then values,
                T at least its ``tokens``.

        Raises:
            InvalidInput: not one such tensor for each piece.
        """
        if self._placement is not None:
            self._placement.place(layer, kv, self._tables_of(layer))
            return
        if len(kv) != len(self.pieces):
            raise InvalidInput("kv", f"{len(kv)} tensors", f"one for each of the {len(self.pieces)} pieces")
        for piece, stored in zip(self.pieces, kv, strict=True):
            self._copy(layer, piece, stored, self._turn(layer, piece.shift))

    def _copy(self, layer: int, piece: Piece, stored: Tensor, turn: Turn | None) -> None:
        k, v = self._k[layer], self._v[layer]
        span = slice(piece.start, piece.start + piece.tokens)
        v[:, span].copy_(stored[1, :, : piece.tokens])
        keys = stored[0, :, : piece.tokens]
        if turn is None:
            k[:, span].copy_(keys)
        else:
            turn.into(keys.to(k.device), k[:, span])

    def _tables_of(self, layer: int) -> cpu.Tables:
        """The angles of all pieces in a layer; zeros for those that stay as they are."""
        rotation = self._rotations[layer]
        if id(rotation) not in self._tables:
            turns = [self._turn(layer, piece.shift) for piece in self.pieces]
            angles = np.zeros((len(turns), 2, rotation.dims // 2 if rotation is not None else 0), np.float32)
            for row, turn in zip(angles, turns, strict=True):
                if turn is not None:
                    row[:] = turn.table
            turned = np.array([turn is not None for turn in turns], np.bool_)
            interleaved = rotation is not None and rotation.pairing == "interleaved"
            self._tables[id(rotation)] = cpu.Tables(angles, turned, interleaved)
        return self._tables[id(rotation)]

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

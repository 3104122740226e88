"""Places stored chunks on a canvas, layer by layer: keys turned by one constant shift a chunk, values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.helper import Helper
from blend.recompute.canvas import Canvas
from blend.recompute.kernels import cpu
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.stored import Stored, Turns
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
        kernels: what places chunks where the loop that is compiled for CPUs does not.
        helper: a thread that takes part in that loop.
    """

    def __init__(
        self,
        canvas: Canvas,
        pieces: Sequence[Piece],
        rotations: Sequence[Rotation | None],
        kernels: Kernels,
        helper: Helper | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self._k, self._v = canvas.k, canvas.v  # not the canvas: it refers to what fills it
        self._rotations = tuple(rotations)
        self._turns: dict[tuple[int, int], Turn] = {}
        self._tables: dict[int, cpu.Tables] = {}
        self._placement: cpu.Placement | _Staged
        if kernels.backend != "torch" or not cpu.supports(canvas.k.dtype, canvas.k.device):
            self._placement = _Staged(canvas, self.pieces, kernels)
        else:
            spans = [(piece.start, piece.tokens) for piece in self.pieces]
            self._placement = cpu.Placement(canvas.k, canvas.v, spans, helper)

    def put(self, layer: int, kv: Sequence[Tensor]) -> None:
        """Write one layer of every chunk.

        Args:
            layer: which layer.
            kv: for each piece ``[2, KVH, T, D]`` in the canvas's dtype, contiguous, on any device: keys then values,
                T at least its ``tokens``.

        Raises:
            InvalidInput: not one such tensor for each piece.
        """
        if isinstance(self._placement, cpu.Placement):
            self._placement.place(layer, kv, self._tables_of(layer))
        else:
            self._placement.place(kv, self._k[layer], self._v[layer], self._rotations[layer])

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


class _Staged:
    """One layer of all chunks at a time: copied to the canvas's device, then placed by one kernel."""

    def __init__(self, canvas: Canvas, pieces: Sequence[Piece], kernels: Kernels) -> None:
        k = canvas.k
        sizes = [(1, 2, k.shape[1], piece.tokens, k.shape[3]) for piece in pieces]
        self._layers = [torch.empty(size, dtype=k.dtype, device=k.device) for size in sizes]
        self._stored = Stored(self._layers)
        spans = [torch.arange(piece.start, piece.start + piece.tokens) for piece in pieces]
        self._slots = torch.cat(spans).to(k.device)
        self._shifts = [piece.shift for piece in pieces]
        self._turns: dict[int, Turns] = {}
        self._assemble = kernels.assemble

    def place(self, kv: Sequence[Tensor], key: Tensor, value: Tensor, rotation: Rotation | None) -> None:
        """Write what ``kv`` holds of one layer to the canvas's ``key`` and ``value`` ``[KVH, N, D]``."""
        if len(kv) != len(self._layers):
            raise InvalidInput("kv", f"{len(kv)} tensors", f"one for each of the {len(self._layers)} pieces")
        for staged, stored in zip(self._layers, kv, strict=True):
            staged[0].copy_(stored[:, :, : staged.shape[3]])
        if rotation is not None and id(rotation) not in self._turns:
            self._turns[id(rotation)] = Turns.of(rotation, self._shifts, key.device)
        turns = None if rotation is None else self._turns[id(rotation)]
        self._assemble(self._stored, 0, key, value, self._slots, turns)


def prepare(dtype: torch.dtype, device: torch.device) -> None:
    """Compile what assembling canvases of this kind needs: once on a machine, and then not while a request waits."""
    if cpu.supports(dtype, device):
        cpu.warm_up(dtype)

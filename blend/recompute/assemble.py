"""Places stored chunks on a canvas, layer by layer: keys turned by one constant shift a chunk, values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blend.helper import Helper
from blend.recompute.canvas import Canvas
from blend.recompute.kernels import cpu
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Rotation, Turn
from blend.recompute.streams import Streams, streams_for
from blend.recompute.transfer import Transfers


@dataclass(frozen=True)
class Piece:
    """A stored chunk's place on a canvas.

    Args:
        start: position on the canvas of the first token that is placed.
        tokens: how many of its tokens are placed.
        stored_at: position that its first token was computed at.
        first: which of its tokens is the first that is placed.
    """

    start: int
    tokens: int
    stored_at: int
    first: int = 0

    @property
    def shift(self) -> int:
        """How many positions its keys turn by."""
        return self.start - (self.stored_at + self.first)


class Assembly:
    """Where all chunks of one request go. Angles are worked out once, and serve every layer that turns alike.

    Args:
        canvas: where to write, ``[L, KVH, N, D]``.
        pieces: one for each chunk.
        rotations: one for each layer, ``None`` for a layer that does not rotate (NoPE).
        kernels: what places chunks where the loop that is compiled for CPUs does not.
        helper: a thread that takes part in that loop.
        streams: what layers are copied to the canvas's device with; ``None`` stands for the device's own.

    Attributes:
        copies: whether layers are copied before they are placed, so that :meth:`ahead` is of use.
    """

    def __init__(
        self,
        canvas: Canvas,
        pieces: Sequence[Piece],
        rotations: Sequence[Rotation | None],
        kernels: Kernels,
        helper: Helper | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self._k, self._v = canvas.k, canvas.v  # not the canvas: it refers to what fills it
        self._rotations = tuple(rotations)
        self._turns: dict[tuple[int, int], Turn] = {}
        self._tables: dict[int, cpu.Tables] = {}
        self._placement: cpu.Placement | _Staged
        self.copies = kernels.backend != "torch" or not cpu.supports(canvas.k.dtype, canvas.k.device)
        if self.copies:
            self._placement = _Staged(canvas, self.pieces, kernels, streams or streams_for(canvas.k.device))
        else:
            spans = [(piece.start, piece.tokens, piece.first) for piece in self.pieces]
            self._placement = cpu.Placement(canvas.k, canvas.v, spans, helper)

    def put(self, layer: int, kv: Sequence[Tensor]) -> None:
        """Write one layer of every chunk. On another device than the CPU it is written when work issued before is done.

        Args:
            layer: which layer.
            kv: for each piece ``[2, KVH, T, D]`` in the canvas's dtype, contiguous, in the host's memory: keys then
                values, T at least its ``first + tokens``. To be left as it is until :meth:`close`.

        Raises:
            InvalidInput: not one such tensor for each piece.
        """
        if isinstance(self._placement, cpu.Placement):
            self._placement.place(layer, kv, self._tables_of(layer))
        else:
            self._placement.place(layer, kv, self._k[layer], self._v[layer], self._rotations[layer])

    def ahead(self, layer: int, kv: Sequence[Tensor]) -> None:
        """Start to copy a layer that :meth:`put` will be called for next, with the same arguments.

        Raises:
            InvalidInput: not one such tensor for each piece, or another layer is to be put before.
        """
        if isinstance(self._placement, _Staged):
            self._placement.transfers.start(layer, kv)

    def close(self) -> None:
        """Wait until nothing that was put is read any more. Safe to call again."""
        if isinstance(self._placement, _Staged):
            self._placement.transfers.close()

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

    def __init__(self, canvas: Canvas, pieces: Sequence[Piece], kernels: Kernels, streams: Streams) -> None:
        device = canvas.k.device
        self.transfers = Transfers([(piece.first, piece.tokens) for piece in pieces], canvas.k, streams)
        self._stored = Stored(self.transfers.targets)
        spans = [torch.arange(piece.start, piece.start + piece.tokens) for piece in pieces]
        self._positions = torch.cat(spans).to(device)
        self._shifts = [piece.shift for piece in pieces]
        self._turns: dict[int, Turns] = {}
        self._assemble = kernels.assemble

    def place(self, layer: int, kv: Sequence[Tensor], key: Tensor, value: Tensor, rotation: Rotation | None) -> None:
        """Write what ``kv`` holds of one layer to the canvas's ``key`` and ``value`` ``[KVH, N, D]``."""
        if rotation is not None and id(rotation) not in self._turns:
            self._turns[id(rotation)] = Turns.of(rotation, self._shifts, key.device)
        turns = None if rotation is None else self._turns[id(rotation)]
        with self.transfers.layer(layer, kv) as slot:
            self._assemble(self._stored, slot, key, value, self._positions, turns)


def prepare(dtype: torch.dtype, device: torch.device) -> None:
    """Compile what assembling canvases of this kind needs: once on a machine, and then not while a request waits."""
    if cpu.supports(dtype, device):
        cpu.warm_up(dtype)

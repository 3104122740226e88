"""Moving KV that is not computed again by what its chunk's KV has moved where it is.

A chunk's stored KV differs from full prefill's by something that its tokens have in common: all of the chunk is looked
at a little too much, say, or too little. Rows that are computed again show it. Their mean move, of keys in a frame
without rotation, is added to the chunk's other tokens, layer by layer and head by head (cf. AgentKVShift, 2026).

Those rows were chosen because they are likely to move far, and the others move less and elsewhere. So each counts in
inverse proportion to how far it moved, which makes the mean one of directions: a first step towards the geometric
median (Weiszfeld, 1937). How many rows a mean is worth is Kish's effective sample size of these weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from blend.model.rows import LayerAttention, Observer, Rows
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Turns
from blend.recompute.rope import Rotation, Turn

DOUBT = 8
"""How many rows count as much as the assumption that nothing moves: with n of them, n / (n + DOUBT) of the mean."""

_LEAST = 1e-12
"""A shorter move counts as this long."""

KV: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of the same shape."""


@dataclass(frozen=True, eq=False)
class Shown:
    """Rows of a pass that show a move.

    Which of its rows and their positions, ``[R]`` int64, and their chunks, ``[R, C]`` float32: 1 for its own, else 0.
    """

    rows: Tensor
    positions: Tensor
    chunks: Tensor
    turns: dict[int, Turn] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)


class Moves:
    """Rows' weighted moves ``[KVH, C, D]`` and their weights ``[KVH, C]``, added up chunk by chunk for each head."""

    def __init__(self, heads: int, chunks: int, dim: int, device: torch.device) -> None:
        self._moves = torch.zeros(heads, chunks, dim, device=device)
        self._weights = torch.zeros(heads, chunks, device=device)
        self._squares = torch.zeros(heads, chunks, device=device)

    def add(self, moves: Tensor, chunks: Tensor) -> None:
        """Add the moves ``[KVH, R, D]`` of rows of these chunks, ``[R, C]``."""
        weights = self.weigh(moves)
        self._moves += chunks.T @ (moves * weights[..., None])  # index_add_ adds up in any order on a GPU
        self._weights += weights @ chunks
        self._squares += weights.square() @ chunks

    @staticmethod
    def weigh(moves: Tensor) -> Tensor:
        """Return how much each of the moves ``[KVH, R, D]`` counts, ``[KVH, R]``: the less, the longer it is."""
        return torch.reciprocal(torch.linalg.vector_norm(moves, dim=2).clamp(min=_LEAST))

    def mean(self) -> Tensor:
        """Return by how much to move each chunk, ``[KVH, C, D]``: n / (n + DOUBT) of the weighted mean."""
        rows = self._weights.square() / self._squares
        return self._moves * (rows / (rows + DOUBT) / self._weights)[..., None]


@dataclass(eq=False)
class Correction:
    """What one request's chunks have moved, and where that is applied.

    Rows before ``start`` read all KV as it is stored; those from it on, and the answer, read it moved. So what is
    computed does not depend on how the rows are cut into passes.

    Args:
        rotations: one for each layer, ``None`` for one whose keys know no positions.
        start: position of the question.
        spans: what is moved of each chunk, all before ``start``.
        numbers: ``[N]`` int64, for each position that is computed again and shows the move of a chunk that chunk's
            number among ``spans``, -1 for all others.
        kernels: what moves keys and values.
        moves: adds up what rows show.
    """

    rotations: tuple[Rotation | None, ...]
    start: int
    spans: Spans
    numbers: Tensor
    kernels: Kernels
    moves: type[Moves] = Moves
    _turns: dict[int, Turns] = field(default_factory=dict, repr=False)
    _seen: dict[int, tuple[Moves, Moves]] = field(default_factory=dict, repr=False)

    def shown(self, positions: Tensor) -> Shown:
        """Return which of the rows at ``positions`` ``[R]`` int64 show a move."""
        numbers = self.numbers[positions]
        rows = (numbers >= 0).nonzero().squeeze(1)
        chunks = torch.nn.functional.one_hot(numbers[rows], len(self.spans)).to(torch.float32)
        return Shown(rows, positions[rows], chunks)

    def saw(self, layer: int, shown: Shown, fresh: KV, stored: KV) -> None:
        """Take note of one layer's KV ``[KVH, R, D]`` as it was computed and as it is stored: each row once."""
        key, value = (new.float() - old.float() for new, old in zip(fresh, stored, strict=True))
        if layer not in self._seen:
            size = len(key), len(self.spans), key.shape[2]
            self._seen[layer] = self.moves(*size, key.device), self.moves(*size, key.device)
        if (rotation := self.rotations[layer]) is not None:
            turn = shown.turns.get(id(rotation))
            if turn is None:
                turn = shown.turns[id(rotation)] = rotation.at(-shown.positions)
            back = torch.empty_like(key, memory_format=torch.contiguous_format)
            turn.into(key, back)
            key = back
        for seen, moves in zip(self._seen[layer], (key, value), strict=True):
            seen.add(moves, shown.chunks)

    def apply(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Move the KV ``[KVH, N, D]`` of one layer's canvas, in float32 and rounded once.

        To be called once all rows before ``start`` were seen, and once: what was noted of the layer is let go of.
        """
        keys, values = (seen.mean() for seen in self._seen.pop(layer))
        rotation = self.rotations[layer]
        self.kernels.move(key, keys, self.spans, None if rotation is None else self._turned(rotation))
        self.kernels.move(value, values, self.spans, None)

    def _turned(self, rotation: Rotation) -> Turns:
        """The turns to all positions before ``start``, 0 where nothing is moved."""
        if id(rotation) not in self._turns:
            moved = self.spans.moved[: self.start, None]
            turn = rotation.at(torch.arange(self.start, device=moved.device))
            self._turns[id(rotation)] = Turns(turn.cos * moved, turn.sin * moved, rotation.pairing)
        return self._turns[id(rotation)]

    def observer(self) -> Correcting:
        """Return what measures and applies it in passes over a canvas that holds the stored KV."""
        return Correcting(self)


class PassRepeated(Exception):
    """Rows were to be computed again on a canvas that does not hold any more what it held before their first pass.

    Where that pass failed half way, KV of some layers is moved for rows that must not see it. The request has to be
    planned again.
    """


class Correcting(Observer):
    """Carries out a correction on a canvas, in passes whose positions ascend from one to the next."""

    def __init__(self, correction: Correction) -> None:
        self._correction = correction
        self._next = 0
        self._shown = correction.shown(correction.numbers[:0])
        self._left = set(range(len(correction.rotations)))

    def before_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Note how far KV moves; raises :class:`PassRepeated`."""
        if layer == 0:
            first = int(rows.at[0])
            if first < self._next:
                raise PassRepeated(f"positions from {first} on were to be computed again on the same canvas")
            self._next = int(rows.at[-1]) + 1
            self._shown = self._correction.shown(rows.positions)
        if layer in self._left and len(self._shown):
            canvas, here, at = rows.canvas, self._shown.rows, self._shown.positions
            stored = canvas.k[layer].index_select(1, at), canvas.v[layer].index_select(1, at)
            self._correction.saw(layer, self._shown, (key.index_select(1, here), value.index_select(1, here)), stored)

    def after_attention(self, layer: int, rows: Rows) -> int:
        """Move the layer's KV, once, behind the attention of what must not see that."""
        late = int((rows.at >= self._correction.start).sum())
        if not late or layer not in self._left:
            return 0
        self._apply(layer, rows.canvas)
        return late

    def finish(self, canvas: Canvas) -> None:
        """Move the KV of all layers where no row from the question on was among those computed."""
        for layer in sorted(self._left):
            self._apply(layer, canvas)

    def _apply(self, layer: int, canvas: Canvas) -> None:
        self._left.remove(layer)
        self._correction.apply(layer, canvas.k[layer], canvas.v[layer])


def correction(
    rotations: tuple[Rotation | None, ...],
    chunks: tuple[tuple[int, int], ...],
    candidates: Tensor,
    chosen: Tensor,
    start: int,
    heads: int,
    kernels: Kernels,
) -> Correction | None:
    """Return the correction of a prompt; ``None`` where no chunk has both rows to go by and tokens to move.

    Args:
        rotations: one for each layer.
        chunks: ``(start, end)`` of every chunk that was loaded, ascending.
        candidates: ``[N]`` bool, tokens whose stored KV is not exact.
        chosen: ``[S]`` int64 ascending, those of them that are computed again.
        start: position of the question.
        heads: of each chunk so many first tokens move in a way of their own, and are neither gone by nor moved.
        kernels: what moves keys and values.
    """
    here = candidates.cpu()
    fresh = torch.zeros(len(here), dtype=torch.bool).index_fill_(0, chosen.cpu(), True)
    numbers, moved = torch.full((len(here),), -1), torch.zeros(len(here))
    spans: list[tuple[int, int]] = []
    for first, end in ((first + heads, end) for first, end in chunks if first + heads < end):
        shows, moves = fresh[first:end], (here & ~fresh)[first:end]
        if bool(shows.any()) and bool(moves.any()):
            numbers[first:end][shows] = len(spans)
            moved[first:end][moves] = 1.0
            spans.append((first, end))
    if not spans:
        return None
    device = candidates.device
    return Correction(rotations, start, Spans(tuple(spans), moved.to(device)), numbers.to(device), kernels)

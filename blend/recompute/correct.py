"""Moving keys that are not computed again by what their chunk's keys have moved where they are.

A chunk's stored keys differ from full prefill's by something that its tokens have in common: all of the chunk is looked
at a little too much, or too little. Rows that are computed again show it. In a frame without rotation their keys' mean
move is added to the chunk's other keys, layer by layer and head by head (cf. AgentKVShift, 2026, which moves values).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blend.model.rows import LayerAttention, Observer, Rows
from blend.recompute.canvas import Canvas
from blend.recompute.rope import Rotation, Turn

DOUBT = 8
"""How many rows count as much as the assumption that nothing moves: with n of them, n / (n + DOUBT) of the mean."""


@dataclass(eq=False)
class Correction:
    """What one request's chunks have moved, and where that is applied.

    Rows before ``start`` read all keys as they are stored; those from it on, and the answer, read them moved. So what
    is computed does not depend on how the rows are cut into passes.

    Args:
        rotations: one for each layer, ``None`` for one whose keys know no positions.
        start: position of the question.
        seen: ``[S]`` int64 ascending, all before ``start``: rows that are computed again and show the move.
        moved: ``[M]`` int64 ascending: positions whose keys are moved.
        seen_chunks, moved_chunks: ``[S]`` and ``[M]`` int64, the number of each one's chunk, from 0 without gaps.
    """

    rotations: tuple[Rotation | None, ...]
    start: int
    seen: Tensor
    moved: Tensor
    seen_chunks: Tensor
    moved_chunks: Tensor
    _turns: dict[tuple[int, bool], Turn] = field(default_factory=dict, repr=False)
    _sums: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def find(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the rows at ``positions`` ``[R]`` show a move, and which of ``seen`` these are."""
        here = torch.isin(positions, self.seen).nonzero().squeeze(1)
        return here, torch.searchsorted(self.seen, positions[here])

    def saw(self, layer: int, which: Tensor, fresh: Tensor, stored: Tensor) -> None:
        """Take note of keys ``[KVH, R, D]`` of one layer, computed and stored, at ``seen[which]``: each once."""
        if layer not in self._sums:
            chunks = int(self.seen_chunks[-1]) + 1
            self._sums[layer] = fresh.new_zeros(len(fresh), chunks, fresh.shape[2], dtype=torch.float32)
        move = self._turned(layer, fresh.float() - stored.float(), seen=True, which=which)
        self._sums[layer].index_add_(1, self.seen_chunks[which], move)

    def applied(self, layer: int, keys: Tensor) -> Tensor:
        """Return the keys ``[KVH, M, D]`` at ``moved`` of one layer, moved, in their dtype.

        To be called once all of ``seen`` has been, and once: what was noted of the layer is let go of.
        """
        sums = self._sums.pop(layer)
        mean = sums / (torch.bincount(self.seen_chunks) + DOUBT)[:, None]
        return (keys.float() + self._turned(layer, mean[:, self.moved_chunks], seen=False)).to(keys.dtype)

    def _turned(self, layer: int, vectors: Tensor, *, seen: bool, which: Tensor | None = None) -> Tensor:
        """Turn vectors ``[KVH, R, D]`` at ``seen`` back to position 0, or from there to ``moved``."""
        rotation = self.rotations[layer]
        if rotation is None:
            return vectors
        turn = self._turns.get((id(rotation), seen))
        if turn is None:
            turn = self._turns[id(rotation), seen] = rotation.at(-self.seen if seen else self.moved)
        out = torch.empty_like(vectors, memory_format=torch.contiguous_format)
        (turn if which is None else turn.only(which)).into(vectors, out)
        return out

    def observer(self) -> Correcting:
        """Return what measures and applies it in passes over a canvas that holds the stored keys."""
        return Correcting(self)


class Correcting(Observer):
    """Carries out a correction on a canvas.

    A pass that failed and is run again finds what it had computed in the place of what was stored, and keys that are
    moved already: nothing is noted or moved twice.
    """

    def __init__(self, correction: Correction) -> None:
        self._correction = correction
        self._rows = self._which = correction.seen[:0]
        self._left = set(range(len(correction.rotations)))

    def before_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Note how far keys move."""
        if layer not in self._left:
            return
        if layer == 0:
            self._rows, self._which = self._correction.find(rows.positions)
        if len(self._rows):
            stored = rows.canvas.k[layer][:, rows.positions[self._rows]]
            self._correction.saw(layer, self._which, key[:, self._rows], stored)

    def after_attention(self, layer: int, rows: Rows) -> int:
        """Move the layer's keys, once, behind the attention of what must not see that."""
        late = int((rows.at >= self._correction.start).sum())
        if not late or layer not in self._left:
            return 0
        self._apply(layer, rows.canvas)
        return late

    def finish(self, canvas: Canvas) -> None:
        """Move the keys of all layers where no row from the question on was among those computed."""
        for layer in sorted(self._left):
            self._apply(layer, canvas)

    def _apply(self, layer: int, canvas: Canvas) -> None:
        self._left.remove(layer)
        moved = self._correction.moved
        canvas.k[layer].index_copy_(1, moved, self._correction.applied(layer, canvas.k[layer][:, moved]))


def correction(
    rotations: tuple[Rotation | None, ...],
    chunks: tuple[tuple[int, int], ...],
    candidates: Tensor,
    chosen: Tensor,
    start: int,
    heads: int,
) -> Correction | None:
    """Return the correction of a prompt; ``None`` where no chunk has both rows to go by and keys to move.

    Args:
        rotations: one for each layer.
        chunks: ``(start, end)`` of every chunk that was loaded, ascending.
        candidates: ``[N]`` bool, tokens whose stored KV is not exact.
        chosen: ``[S]`` int64 ascending, those of them that are computed again.
        start: position of the question.
        heads: of each chunk so many first tokens move in a way of their own, and are neither gone by nor moved.
    """
    fresh = torch.zeros(len(candidates), dtype=torch.bool, device=candidates.device).index_fill_(0, chosen, True)
    numbers = torch.full((len(candidates),), -1, dtype=torch.int64, device=candidates.device)
    known = 0
    for first, end in chunks:
        inside = slice(first + heads, end)
        if bool(fresh[inside].any()) and bool((candidates & ~fresh)[inside].any()):
            numbers[inside] = known
            known += 1
    if not known:
        return None
    seen = (fresh & (numbers >= 0)).nonzero().squeeze(1)
    moved = (candidates & ~fresh & (numbers >= 0)).nonzero().squeeze(1)
    return Correction(rotations, start, seen, moved, numbers[seen], numbers[moved])

"""Which of a library's chunks are near to each other: what each of them is to be encoded behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blend.rag.catalog import Catalog
from blend.rag.index import Index
from blend.rag.records import Changes, ChunkRow, Head

# Chunks of the same text are no neighbours: so many are looked at for each that is wanted, and in the end so many.
_LOOKED_AT = 4
_MOST_LOOKED_AT = 256


@dataclass(frozen=True)
class Neighbourhood:
    """A chunk that can be retrieved, and the chunks nearest to it: the farthest first, so that the nearest stands last.

    No two of them have the same text, nor the same tokens.
    """

    chunk: ChunkRow
    neighbours: tuple[ChunkRow, ...]


class Neighbours:
    """The chunks of one library that can be retrieved, and how they lie. All methods may be called from any thread.

    Args:
        catalog: the chunks.
        index: their embeddings.
    """

    def __init__(self, catalog: Catalog, index: Index) -> None:
        self._catalog = catalog
        self._index = index

    def everything(self) -> Changes:
        """All chunks that can be retrieved, as if they had just been added.

        Later changes may be in it, and are told by :meth:`changes_since` again.
        """
        head = self._catalog.head()
        self._index.catch_up(self._catalog)
        return Changes(head, added=self._index.rows, removed=())

    def changes_since(self, head: Head) -> Changes | None:
        """What came and went; ``None`` where that is not known any more: then :meth:`everything` is."""
        changes = self._catalog.changes_since(head)
        self._index.catch_up(self._catalog)
        return changes

    def chunks(self, rows: Sequence[int]) -> tuple[ChunkRow, ...]:
        """The chunks of these row ids; those that are gone are left out."""
        return self._catalog.chunks_by_row(rows)

    def around(self, rows: Sequence[int], count: int) -> set[int]:
        """Row ids of the ``count`` chunks nearest to each of these: they may have got a nearer neighbour by them."""
        return {other for found in self._index.nearest(rows, count).values() for other in found}

    def of(self, rows: Sequence[int], count: int, longest: Callable[[int], int]) -> tuple[Neighbourhood, ...]:
        """The ``count`` nearest chunks to each of these, in the order of ``rows``; chunks that are gone are left out.

        The same chunks always have the same neighbours.

        Args:
            longest: returns for a chunk of so many tokens how many a neighbour may have; the next nearest stand in for
                longer ones.
        """
        found: dict[int, Neighbourhood] = {}
        left, looked_at = list(rows), _LOOKED_AT * count
        while left:
            nearest = self._index.nearest(left, looked_at)
            wanted = {*nearest, *(other for others in nearest.values() for other in others)}
            here = {chunk.row_id: chunk for chunk in self._catalog.chunks_by_row(sorted(wanted))}
            left = []
            for row, others in nearest.items():
                if (chunk := here.get(row)) is None:
                    continue
                most = longest(len(chunk.token_ids))
                fitting = (here[other] for other in others if other in here and len(here[other].token_ids) <= most)
                chosen = _distinct(chunk, fitting, count)
                if len(chosen) < count and len(others) == looked_at and looked_at < _MOST_LOOKED_AT:
                    left.append(row)
                else:
                    found[row] = Neighbourhood(chunk, tuple(reversed(chosen)))
            looked_at = min(4 * looked_at, _MOST_LOOKED_AT)
        return tuple(found[row] for row in rows if row in found)


def _distinct(chunk: ChunkRow, nearest: Iterable[ChunkRow], count: int) -> list[ChunkRow]:
    """The first ``count`` that differ from the chunk and from each other."""
    texts, tokens = {chunk.text}, {chunk.token_ids}
    chosen: list[ChunkRow] = []
    for other in nearest:
        if len(chosen) == count:
            break
        if other.text not in texts and other.token_ids not in tokens:
            texts.add(other.text)
            tokens.add(other.token_ids)
            chosen.append(other)
    return chosen

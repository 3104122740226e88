"""Which chunks of a tenant are encoded behind their neighbours, and which are still to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from blend.rag.neighbours import Neighbourhood
from blend.rag.records import Head
from blend.store.key import PLAIN, ObjectKey
from blend.types import Chunk

if TYPE_CHECKING:
    from blend.rag.library import Library
    from blend.rag.records import ChunkRow
    from blend_server.engines import ConditioningEngine

# Searched for at once, while questions of the tenant wait for the index.
_AT_ONCE = 16
_READ_AT_ONCE = 256
# Chunks around a new one that may have got a nearer neighbour by it, for each neighbour of a chunk.
_AROUND = 4


class Conditioned:
    """Follows one library: what it holds is what the last :meth:`follow` saw. Its methods are called one at a time.

    What is stored is known from the store alone, which is asked once for each chunk. A chunk that is stored behind
    neighbours stays as it is while all of them are there, and at least half of them are still among the nearest: one
    new document must not have all others' chunks encoded again.

    Args:
        library: the tenant's documents.
        engine: has the store.
        count: neighbours of a chunk.
    """

    def __init__(self, library: Library, engine: ConditioningEngine, count: int) -> None:
        self._library = library
        self._engine = engine
        self._count = count
        self._clear()

    def _clear(self) -> None:
        self._head: Head | None = None
        self._keys: dict[int, str] = {}
        self._held: Counter[str] = Counter()
        self._others: list[int] = []
        self._behind: dict[int, tuple[str, ...]] = {}
        self._unseen: dict[int, None] = {}
        self._due: dict[int, Neighbourhood] = {}

    @property
    def conditioned(self) -> int:
        """Chunks that are stored behind neighbours; one that two documents share counts twice."""
        return len(self._behind)

    @property
    def waiting(self) -> int:
        """Chunks that are to be encoded, or still to be looked at."""
        return len(self._unseen) + len(self._due)

    @property
    def next(self) -> Neighbourhood | None:
        """A chunk that is to be encoded behind its neighbours; :meth:`look` finds more."""
        return next(iter(self._due.values()), None)

    def follow(self) -> None:
        """Take note of what came and went in the library since the last time; at first that is everything.

        Raises:
            Closed: the library was closed.
            StoreError: it cannot be read.
        """
        try:
            self._follow()
        except BaseException:
            self._clear()  # what is half taken in is not known any more
            raise

    def look(self) -> None:
        """Find out about some of the chunks that were not looked at yet.

        Raises:
            Closed: the library was closed.
            StoreError: it cannot be read.
        """
        rows = list(islice(self._unseen, _AT_ONCE))
        near = self._library.neighbours.of(rows, self._count, self._engine.longest_neighbour)
        found = {one.chunk.row_id: one for one in near}
        for row in rows:
            one = found.get(row)
            if one is not None:  # else it has gone, and the next change says so
                self._judge(row, self._present(one))
            del self._unseen[row]

    def settle(self, one: Neighbourhood, encoded: bool) -> None:
        """Take note that a chunk was encoded behind its neighbours, or could not be, for one of them has gone."""
        row = one.chunk.row_id
        self._due.pop(row, None)
        if encoded:
            self._behind[row] = _keys(one)
        else:
            self._unseen[row] = None

    def postpone(self, one: Neighbourhood) -> None:
        """Put a chunk behind all others."""
        self._due[one.chunk.row_id] = self._due.pop(one.chunk.row_id)

    def _follow(self) -> None:
        neighbours = self._library.neighbours
        changes = None if self._head is None else neighbours.changes_since(self._head)
        whole = changes is None
        if changes is None:
            self._clear()
            changes = neighbours.everything()
        added = self._take_in((*changes.added, *self._others))
        gone = self._take_out(changes.removed)
        for row in [row for row, behind in self._behind.items() if not gone.isdisjoint(behind)]:
            del self._behind[row]  # the engine forgets it with its neighbour
            self._unseen[row] = None
        if not whole:
            for start in range(0, len(added), _AT_ONCE):
                around = neighbours.around(added[start : start + _AT_ONCE], _AROUND * self._count)
                self._unseen.update((row, None) for row in sorted(around) if row in self._keys)
        # Their neighbours are of before.
        self._unseen.update(dict.fromkeys(self._due))
        self._due.clear()
        self._head = changes.head

    def _take_out(self, rows: Iterable[int]) -> set[str]:
        """Forget chunks; return the content keys that no other chunk has."""
        gone = set()
        for row in rows:
            for known in (self._unseen, self._due, self._behind):
                known.pop(row, None)
            if (key := self._keys.pop(row, None)) is not None:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]
                    gone.add(key)
        return gone

    def _take_in(self, rows: Sequence[int]) -> list[int]:
        """Take note of chunks that were not known; return those that are new.

        Those whose documents wait to be processed for the present model have keys of another one: they are for later.
        """
        new = [row for row in dict.fromkeys(rows) if row not in self._keys]
        some = self._engine.content_key(Chunk((0,)), namespace=self._library.namespace)
        tag, self._others = ObjectKey(some, PLAIN).namespace, []
        added = []
        for start in range(0, len(new), _READ_AT_ONCE):
            for chunk in self._library.neighbours.chunks(new[start : start + _READ_AT_ONCE]):
                if not ObjectKey(chunk.content_key, PLAIN).within(tag):
                    self._others.append(chunk.row_id)
                    continue
                added.append(chunk.row_id)
                self._keys[chunk.row_id] = chunk.content_key
                self._held[chunk.content_key] += 1
                self._unseen[chunk.row_id] = None
        return added

    def _present(self, one: Neighbourhood) -> Neighbourhood:
        """A chunk with those neighbours alone that are processed for the present model."""
        return Neighbourhood(one.chunk, tuple(other for other in one.neighbours if other.row_id in self._keys))

    def _judge(self, row: int, one: Neighbourhood) -> None:
        stored = self._engine.behind(chunk_of(one.chunk), namespace=self._library.namespace)
        self._behind.pop(row, None)
        if self._holds(stored, _keys(one)):
            self._behind[row] = stored
        elif one.neighbours:
            self._due[row] = one

    def _holds(self, stored: Sequence[str], nearest: Sequence[str]) -> bool:
        """Whether a chunk that is stored behind some neighbours stays as it is."""
        if not stored or not all(key in self._held for key in stored):
            return False
        return 2 * len({*stored} & {*nearest}) >= max(len(stored), len(nearest))


def chunk_of(row: ChunkRow) -> Chunk:
    """The chunk as the engine takes it."""
    return Chunk(row.token_ids)


def _keys(one: Neighbourhood) -> tuple[str, ...]:
    return tuple(other.content_key for other in one.neighbours)

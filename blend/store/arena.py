"""One block of memory, taken from the system once, and an allocator that hands out parts of it."""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from blend.errors import StoreError, TierUnavailable
from blend.store.buffers import ALIGN, Buffer

_Bytes = npt.NDArray[np.uint8]


class Extents:
    """Which parts of a range of bytes are free. Best fit; neighbours that are free are one.

    Free parts are indexed by their size: as many different sizes as can be free at once are few (their sum is at most
    the range), so that finding the best one is a binary search over them, and everything else a dictionary's work.

    Args:
        nbytes: length of the range.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = 0
        self._sizes: list[int] = []
        self._starts: dict[int, dict[int, None]] = {}
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        if nbytes:
            self._give(0, nbytes)

    @property
    def taken(self) -> int:
        """How many parts are not free."""
        return len(self._taken)

    def longest(self, kept: Collection[int]) -> int:
        """Return the bytes of the longest part there would be if all were free but those at the starts ``kept``."""
        longest = run = 0
        for start, nbytes in sorted([*self._size_at.items(), *self._taken.items()]):
            run = 0 if start in kept else run + nbytes
            longest = max(longest, run)
        return longest

    def take(self, nbytes: int) -> int | None:
        """Return where ``nbytes``, a positive number, are free; they are not any more. ``None`` if there is no place.

        Of several parts of the best size, the one that was freed last is taken: its memory is in a cache yet.
        """
        place = bisect_left(self._sizes, nbytes)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        start = next(reversed(self._starts[size]))
        self._withdraw(start)
        if size > nbytes:
            self._give(start + nbytes, size - nbytes)
        self._taken[start] = nbytes
        return start

    def give_back(self, start: int) -> None:
        """Free what :meth:`take` returned ``start`` for."""
        nbytes = self._taken.pop(start)
        following = self._size_at.get(start + nbytes)
        if following is not None:
            self._withdraw(start + nbytes)
            nbytes += following
        before = self._start_before.get(start)
        if before is not None:
            nbytes += self._size_at[before]
            self._withdraw(before)
            start = before
        self._give(start, nbytes)

    def check(self) -> None:
        """Raise :class:`StoreError` unless free and taken parts tile the range and no two free ones touch."""
        parts = sorted(
            [(s, n, True) for s, n in self._size_at.items()] + [(s, n, False) for s, n in self._taken.items()]
        )
        end, was_free = 0, False
        for start, nbytes, is_free in sorted(parts):
            if start != end or nbytes < 1 or (is_free and was_free):
                raise StoreError(f"arena: {nbytes} bytes at {start} follow a part that ends at {end}")
            end, was_free = start + nbytes, is_free
        indexed = sorted((start, size) for size, starts in self._starts.items() for start in starts)
        sizes = sorted(self._starts)
        if end != self.nbytes or indexed != sorted(self._size_at.items()) or sizes != self._sizes:
            raise StoreError(f"arena: its parts end at {end} of {self.nbytes} bytes, or its indices disagree")
        ends = {start + size: start for start, size in self._size_at.items()}
        if ends != self._start_before or self.free != sum(self._size_at.values()):
            raise StoreError(f"arena: {self.free} bytes are counted as free, {sum(self._size_at.values())} are")

    def _give(self, start: int, nbytes: int) -> None:
        if nbytes not in self._starts:
            self._starts[nbytes] = {}
            insort(self._sizes, nbytes)
        self._starts[nbytes][start] = None
        self._size_at[start] = nbytes
        self._start_before[start + nbytes] = start
        self.free += nbytes

    def _withdraw(self, start: int) -> None:
        nbytes = self._size_at.pop(start)
        del self._start_before[start + nbytes]
        starts = self._starts[nbytes]
        del starts[start]
        if not starts:
            del self._starts[nbytes]
            del self._sizes[bisect_left(self._sizes, nbytes)]
        self.free -= nbytes


class Block:
    """A part of an arena. It is in use while a view of it lives, however that was derived.

    Views keep the array alive that they are all made from, so that no count has to be kept and no reader can be
    forgotten.
    """

    __slots__ = ("_memory", "_window", "nbytes", "start")

    def __init__(self, memory: _Bytes, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self._memory: _Bytes | None = memory
        self._window: weakref.ref[_Bytes] | None = None

    @property
    def in_use(self) -> bool:
        """Whether anything can still touch it."""
        return self._window is not None and self._window() is not None

    def view(self) -> memoryview:
        """Return a writable view of all of it."""
        window = self._window() if self._window is not None else None
        if window is None:
            assert self._memory is not None, "a block that was dropped is not read"
            window = self._memory[self.start : self.start + self.nbytes]
            self._window = weakref.ref(window)
        return memoryview(window)

    def drop(self) -> None:
        """Leave the memory to the views that are left."""
        self._memory = None


class Arena:
    """A block of memory of a fixed size, whose parts begin at multiples of :data:`~blend.store.buffers.ALIGN`.

    Its owner's lock guards every call.

    It is taken from the system at once and filled by it page by page, on first use. Its own size is a little above
    ``nbytes``, to make up for what rounding to :data:`ALIGN` costs.

    Args:
        nbytes: what it is to hold.
        allocate: where the memory comes from: called once with the size, it returns a writable buffer of that length
            or more. ``None`` takes it from the system.

    Raises:
        TierUnavailable: there is no such memory.
    """

    def __init__(self, nbytes: int, allocate: Callable[[int], Buffer] | None = None) -> None:
        total = _rounded(nbytes + nbytes // 64) + ALIGN
        try:
            memory = np.frombuffer(allocate(total) if allocate is not None else _anonymous(total), dtype=np.uint8)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise TierUnavailable(f"the system has no memory for {total} bytes: {error}") from error
        if len(memory) < total or not memory.flags.writeable:
            raise TierUnavailable(f"the allocator gave {len(memory)} bytes, {total} writable ones are needed")
        self._memory: _Bytes | None = memory
        self._offset = -memory.ctypes.data % ALIGN
        self._extents = Extents(total - ALIGN)

    @property
    def memory(self) -> memoryview:
        """All of it, writable, for transfers to be registered."""
        assert self._memory is not None, "it goes when the arena is closed"
        return memoryview(self._memory)

    @property
    def blocks(self) -> int:
        """How many blocks are taken."""
        return self._extents.taken

    def could_take(self, nbytes: int, kept: Iterable[Block]) -> bool:
        """Return whether there would be a block of ``nbytes`` without any others than ``kept``."""
        return self._extents.longest({block.start - self._offset for block in kept}) >= _rounded(nbytes)

    def take(self, nbytes: int) -> Block | None:
        """Return a block of ``nbytes``, or ``None`` if there is none in one piece."""
        assert self._memory is not None
        start = self._extents.take(_rounded(nbytes))
        return Block(self._memory, self._offset + start, nbytes) if start is not None else None

    def give_back(self, block: Block) -> None:
        """Free a block that nothing uses any more."""
        assert not block.in_use
        block.drop()
        self._extents.give_back(block.start - self._offset)

    def check(self) -> None:
        """Raise :class:`StoreError` unless its parts tile it."""
        self._extents.check()

    def close(self) -> None:
        """Let go of the memory; it goes back to the system with the last view."""
        self._memory = None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _anonymous(nbytes: int) -> mmap.mmap:
    """Return private memory that the system fills on first use, in large pages where it has them.

    In small ones, first use costs several times what the bytes themselves do.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system may be built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

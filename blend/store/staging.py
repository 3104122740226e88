"""One block of memory, registered once, that transfers go through."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from time import monotonic

from blend.errors import InvalidInput, ResourceExhausted, StoreError, TierUnavailable
from blend.store.buffers import allocate

_ALIGNMENT = 4096


class Staging:
    """An arena whose pieces are views. A piece is given back when the last view of it is garbage, by itself: whoever
    still may touch it, a stalled transfer included, keeps it.

    Args:
        name: whose it is; errors begin with it.
        nbytes: its size, rounded up to whole pages of 4096 bytes.

    Raises:
        TierUnavailable: the system has no memory for it.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.capacity = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        room = allocate(self.capacity + _ALIGNMENT)
        skip = -room.ctypes.data % _ALIGNMENT
        self._arena = room[skip : skip + self.capacity]
        self.address = self._arena.ctypes.data
        self._free: list[tuple[int, int]] = [(0, self.capacity)]
        # Finalizers run wherever the last reference goes, so possibly in a thread that is in here: they touch this
        # queue alone, and the lock can be taken again.
        self._returned: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition(threading.RLock())

    @property
    def memory(self) -> memoryview:
        """The whole arena, to be registered."""
        return self._arena.data

    @property
    def used(self) -> int:
        """Bytes of all pieces that are out, rounded up to whole pages."""
        with self._changed:
            self._collect()
            return self.capacity - sum(stop - start for start, stop in self._free)

    def take(self, nbytes: int, seconds: float) -> memoryview:
        """Return a writable piece of ``nbytes``; wait at most ``seconds`` for others to give theirs back.

        Raises:
            InvalidInput: ``nbytes`` is not positive.
            ResourceExhausted: it is larger than the arena.
            TierUnavailable: there was no room in time.
        """
        if nbytes < 1:
            raise InvalidInput("nbytes", nbytes, "a positive integer")
        if nbytes > self.capacity:
            raise ResourceExhausted(f"{self.name}: {nbytes} bytes are larger than the staging memory, {self.capacity}")
        need, end = -(-nbytes // _ALIGNMENT) * _ALIGNMENT, monotonic() + seconds
        with self._changed:
            while (start := self._carve(need)) is None:
                left = end - monotonic()
                if left <= 0:
                    raise TierUnavailable(
                        f"{self.name}: no room for {nbytes} bytes in the staging memory: {self.used} of {self.capacity}"
                        " bytes are in use"
                    )
                self._changed.wait(left)
        window = self._arena[start : start + nbytes]
        weakref.finalize(window, self._give_back, start, start + need).atexit = False
        return window.data

    def check(self) -> None:
        """Raise :class:`StoreError` unless the free pieces are in order, apart, and within the arena."""
        with self._changed:
            self._collect()
            ends = [0, *(end for piece in self._free for end in piece), self.capacity]
            apart = all(left[1] < right[0] for left, right in zip(self._free, self._free[1:], strict=False))
            if ends != sorted(ends) or not apart:
                raise StoreError(f"{self.name}: the free pieces of {self.capacity} bytes of staging are {self._free}")

    def _give_back(self, start: int, stop: int) -> None:
        self._returned.append((start, stop))
        with self._changed:
            self._changed.notify_all()

    def _carve(self, need: int) -> int | None:
        self._collect()
        for place, (start, stop) in enumerate(self._free):
            if stop - start >= need:
                self._free[place : place + 1] = [(start + need, stop)] if stop - start > need else []
                return start
        return None

    def _collect(self) -> None:
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self._free):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged

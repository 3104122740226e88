"""The host-memory tier."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from blend.errors import Closed, TierUnavailable
from blend.store.base import Lease, Tier, TierStats, Writer, check_nbytes, destination
from blend.store.buffers import allocate
from blend.store.key import ObjectKey, check_content
from blend.store.layout import Header, check_identity, decode
from blend.store.ledger import Ledger

_Bytes = npt.NDArray[np.uint8]


class _Resident:
    """An object in memory. It is pinned while its ``window`` lives: the array that all views of it are made from.

    Views keep the window alive by themselves, however they were derived, so that no count has to be kept and no
    reader can be forgotten.
    """

    __slots__ = ("_buffer", "_window", "header", "key", "nbytes")

    def __init__(self, header: Header, buffer: _Bytes) -> None:
        self.header = header
        self.key = header.key
        self.nbytes = len(buffer)
        self._buffer: _Bytes | None = buffer
        self._window: weakref.ref[_Bytes] | None = None

    @property
    def pinned(self) -> bool:
        return self._window is not None and self._window() is not None

    def view(self) -> memoryview:
        """Return a read-only view of the whole object, which pins it."""
        window = self._window() if self._window is not None else None
        if window is None:
            assert self._buffer is not None, "only objects that can still be looked up are read"
            window = self._buffer[:]
            window.flags.writeable = False
            self._window = weakref.ref(window)
        return window.data

    def drop(self) -> None:
        """Leave the memory to the views that are left."""
        self._buffer = None


class HostTier(Tier):
    """Objects in this process's memory, verified when they enter, read without a copy.

    Args:
        capacity_bytes: budget for objects and for those being written, headers included; at least 1.
        name: what reports call it.

    Raises:
        InvalidConfig: the budget is no positive integer.
    """

    def __init__(self, capacity_bytes: int, name: str = "host") -> None:
        self.name = name
        self._ledger: Ledger[_Resident] = Ledger(name, capacity_bytes)
        self._lock = threading.Lock()
        self._hits = self._misses = self._failures = 0
        self._closed = False

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        check_nbytes(nbytes)
        with self._lock:
            self._require_open()
            for evicted in self._ledger.reserve(nbytes):
                evicted.drop()
        try:
            return _HostWriter(self, key, allocate(nbytes))
        except TierUnavailable:
            with self._lock:
                self._ledger.cancel(nbytes)
                self._failures += 1
            raise

    def get(self, key: ObjectKey) -> Lease | None:
        with self._lock:
            self._require_open()
            held = self._ledger.use(key)
            if held is None:
                self._misses += 1
                return None
            self._hits += 1
            return _HostLease(held.header, self.name, held.view())

    def contains(self, key: ObjectKey) -> bool:
        with self._lock:
            self._require_open()
            return key in self._ledger

    def variants(self, content: str) -> tuple[str, ...]:
        check_content("content", content)
        with self._lock:
            self._require_open()
            return self._ledger.variants(content)

    def remove(self, key: ObjectKey) -> bool:
        with self._lock:
            self._require_open()
            held = self._ledger.find(key)
            if held is None:
                return False
            self._ledger.remove(held)
            held.drop()
            return True

    def keys(self) -> Iterator[ObjectKey]:
        with self._lock:
            self._require_open()
            return iter(self._ledger.keys())

    def stats(self) -> TierStats:
        with self._lock:
            self._require_open()
            return TierStats(
                name=self.name,
                objects=len(self._ledger),
                used_bytes=self._ledger.used,
                capacity_bytes=self._ledger.capacity,
                hits=self._hits,
                misses=self._misses,
                failures=self._failures,
                evictions=self._ledger.evictions,
            )

    def check_integrity(self) -> None:
        with self._lock:
            self._require_open()
            self._ledger.check()
            keys = self._ledger.keys()
        for key in keys:
            with self._lock:
                held = self._ledger.find(key)
                view = held.view() if held is not None else None
            if held is not None and view is not None:
                held.header.verify_payload(view[held.header.header_nbytes :])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._ledger.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the tier has been closed")

    def _settle(self, held: _Resident) -> bool:
        with self._lock:
            self._require_open()
            if held.key in self._ledger:
                return False
            self._ledger.settle(held)
            return True

    def _cancel(self, nbytes: int) -> None:
        with self._lock:
            self._ledger.cancel(nbytes)


class _HostWriter(Writer):
    def __init__(self, tier: HostTier, key: ObjectKey, buffer: _Bytes) -> None:
        super().__init__(key, len(buffer))
        self._tier = tier
        self._buffer: _Bytes | None = buffer

    def _write(self, offset: int, view: memoryview) -> None:
        assert self._buffer is not None
        self._buffer[offset : offset + len(view)] = np.frombuffer(view, np.uint8)

    def _fill(self, offset: int, nbytes: int, source: Callable[[memoryview], object]) -> None:
        assert self._buffer is not None
        source(self._buffer[offset : offset + nbytes].data)

    def _commit(self) -> bool:
        assert self._buffer is not None
        header = decode(self._buffer)
        check_identity(header, self.key, self.nbytes)
        header.verify_payload(self._buffer[header.header_nbytes :])
        stored = self._tier._settle(_Resident(header, self._buffer))
        self._buffer = None
        return stored

    def _revoke(self) -> None:
        self._buffer = None
        self._tier._cancel(self.nbytes)


class _HostLease(Lease):
    def __init__(self, header: Header, tier: str, view: memoryview) -> None:
        super().__init__(header, tier)
        self._view: memoryview | None = view

    def layer(self, layer: int, into: memoryview | None = None) -> memoryview:
        return self._read(*self.header.layer_range(layer), into)

    def payload(self, into: memoryview | None = None) -> memoryview:
        return self._read(self.header.header_nbytes, self.header.payload_nbytes, into)

    def _read(self, offset: int, nbytes: int, into: memoryview | None) -> memoryview:
        view = self._view
        if view is None:
            raise self._released()
        view = view[offset : offset + nbytes]
        if into is None:
            return view
        into = destination(into, nbytes)
        into[:] = view
        return into.toreadonly()

    def release(self) -> None:
        self._view = None

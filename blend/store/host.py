"""The host-memory tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from blend.errors import Closed, ResourceExhausted, StoreError
from blend.store.arena import Arena, Block
from blend.store.base import Tier, TierStats, Writer, check_nbytes, given
from blend.store.buffers import Buffer
from blend.store.key import ObjectKey, check_content
from blend.store.layout import Header, check_identity, decode
from blend.store.lease import Readers, TimedLease
from blend.store.observed import ObservedLedger
from blend.store.residency import ResidencyObserver
from blend.store.tenants import NO_QUOTAS, Quotas, TenantUsage
from blend.store.terms import DEFAULT_TERMS, Terms


class _Resident:
    """An object in the arena, or what is left of one that was removed or never finished (it has no header then).

    It is pinned while a view of its block lives: leases hold one, and so does whatever was made from theirs.
    """

    __slots__ = ("block", "header", "key", "nbytes", "readers")

    def __init__(self, key: ObjectKey, block: Block, header: Header | None = None) -> None:
        self.key = key
        self.header = header
        self.block = block
        self.nbytes = block.nbytes
        self.readers = Readers()

    @property
    def pinned(self) -> bool:
        self.readers.lapse()
        return self.block.in_use

    def view(self) -> memoryview:
        """Return a read-only view of the whole object, which pins it."""
        return self.block.view().toreadonly()


class HostTier(Tier):
    """Objects in this process's memory, verified when they enter, read without a copy.

    All of them lie in one arena, as large as the budget, that is taken from the system once. An object takes one
    piece of it; where the free pieces are too small, objects go that make a larger one, least recently used first.

    Args:
        capacity_bytes: budget for objects and for those being written, headers included; at least 1.
        name: what reports call it.
        terms: lease time, watermarks and clock.
        allocate: where the arena's memory comes from, pinned memory say: called once with a number of bytes, it
            returns a writable buffer of that length or more. ``None`` takes it from the system, which fills it page
            by page on first use.
        observer: told what enters and what leaves; when the tier is closed, that is everything.
        quotas: what each tenant may hold of the budget.

    Raises:
        InvalidConfig: the budget is no positive integer.
        TierUnavailable: there is no such memory.
    """

    persistent = False
    in_memory = True

    def __init__(
        self,
        capacity_bytes: int,
        name: str = "host",
        terms: Terms = DEFAULT_TERMS,
        allocate: Callable[[int], Buffer] | None = None,
        observer: ResidencyObserver | None = None,
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        self.name = name
        self._terms = terms
        self._ledger: ObservedLedger[_Resident] = ObservedLedger(name, capacity_bytes, terms, observer, quotas)
        self._ledger.on_gone = self._free
        self._arena = Arena(capacity_bytes, allocate)
        self._lock = threading.Lock()
        self._writing: set[Block] = set()
        self._hits = self._misses = self._failures = 0
        self._closed = False

    @property
    def memory(self) -> memoryview:
        """The memory that all objects lie in, to be registered for transfers: a writable flat view.

        Transfers are made to and from views of leases and writers, which keep their part of it from being used again.

        Raises:
            Closed: the tier has been closed.
        """
        with self._lock:
            self._require_open()
            return self._arena.memory

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        check_nbytes(nbytes)
        with self._lock:
            self._require_open()
            for evicted in self._ledger.reserve(key, nbytes):
                self._free(evicted)
            try:
                block = self._take(nbytes)
            except ResourceExhausted:
                self._ledger.cancel(key, nbytes)
                raise
            self._writing.add(block)
            return _HostWriter(self, key, block)

    def get(self, key: ObjectKey) -> HostLease | None:
        with self._lock:
            self._require_open()
            held = self._ledger.use(key)
            if held is None:
                self._misses += 1
                return None
            self._hits += 1
            lease = HostLease(self, held, self._terms)
            held.readers.add(lease)
            return lease

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
            self._ledger.reap()
            return True

    def pin(self, key: ObjectKey, seconds: float | None = None) -> bool:
        with self._lock:
            self._require_open()
            if key not in self._ledger:
                return False
            self._ledger.pins.pin(key, seconds)
            return True

    def unpin(self, key: ObjectKey) -> bool:
        with self._lock:
            self._require_open()
            return self._ledger.pins.unpin(key)

    def keep_while(self, wanted: Callable[[ObjectKey], bool]) -> bool:
        with self._lock:
            self._ledger.keep = wanted
        return True

    def keys(self) -> Iterator[ObjectKey]:
        with self._lock:
            self._require_open()
            return iter(self._ledger.keys())

    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        with self._lock:
            self._require_open()
            return iter([(held.key, held.nbytes) for held in self._ledger.objects()])

    def headers(self, keys: Iterable[ObjectKey]) -> Iterator[Header]:
        with self._lock:
            self._require_open()
            held = [self._ledger.find(key) for key in keys]
            return iter([one.header for one in held if one is not None and one.header is not None])

    def tenants(self) -> tuple[TenantUsage, ...]:
        with self._lock:
            self._require_open()
            return self._ledger.usage()

    def lingering(self, tag: str) -> int:
        with self._lock:
            self._require_open()
            return self._ledger.lingering(tag)

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
            if self._ledger.used > self._ledger.capacity:
                raise StoreError(f"{self.name}: {self._ledger.used} of {self._ledger.capacity} bytes are used")
            self._arena.check()
            known = len(self._ledger) + len(self._ledger.departing) + len(self._writing)
            if self._arena.blocks != known:
                raise StoreError(f"{self.name}: {self._arena.blocks} blocks are taken, {known} are known")
            keys = self._ledger.keys()
        for key in keys:
            with self._lock:
                held = self._ledger.find(key)
                view = held.view() if held is not None else None
            if held is not None and held.header is not None and view is not None:
                held.header.verify(view[held.header.header_nbytes :])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for held in self._ledger.objects():
                self._ledger.remove(held)
            self._ledger.clear()
            self._arena.close()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the tier has been closed")

    def _take(self, nbytes: int) -> Block:
        """Return a block, for bytes that the budget has; evict more where they are in pieces."""
        block = self._arena.take(nbytes)
        if block is None and self._could_take(nbytes):
            while block is None and (victims := self._ledger.evict(1, 1)):
                for evicted in victims:
                    self._free(evicted)
                block = self._arena.take(nbytes)
        if block is None:
            raise ResourceExhausted(
                f"{self.name}: no {nbytes} bytes in one piece: leases, pins and writers lie in between; "
                "release some, or give the tier a larger budget"
            )
        return block

    def _could_take(self, nbytes: int) -> bool:
        """Return whether evicting everything that may go would be enough: else nothing should go."""
        kept = [held.block for held in self._ledger.objects() if not self._ledger.evictable(held)]
        kept += [held.block for held in self._ledger.departing]
        return self._arena.could_take(nbytes, [*kept, *self._writing])

    def _free(self, held: _Resident) -> None:
        if not self._closed:
            self._arena.give_back(held.block)

    def _settle(self, held: _Resident) -> bool:
        with self._lock:
            self._require_open()
            if held.key in self._ledger:
                return False
            self._ledger.settle(held)
            self._writing.discard(held.block)
            return True

    def _cancel(self, key: ObjectKey, block: Block) -> None:
        """Take an unfinished object's space back: at once, or when the last view of it is gone."""
        with self._lock:
            self._writing.discard(block)
            self._ledger.linger(_Resident(key, block))
            self._ledger.reap()


class _HostWriter(Writer):
    def __init__(self, tier: HostTier, key: ObjectKey, block: Block) -> None:
        super().__init__(key, block.nbytes)
        self._tier = tier
        self._block = block
        self._buffer: memoryview | None = block.view()

    def _write(self, offset: int, view: memoryview) -> None:
        assert self._buffer is not None
        self._buffer[offset : offset + len(view)] = view

    def _fill(self, offset: int, nbytes: int, source: Callable[[memoryview], object]) -> None:
        assert self._buffer is not None
        source(self._buffer[offset : offset + nbytes])

    def _peek(self, offset: int, nbytes: int) -> memoryview:
        assert self._buffer is not None
        return self._buffer[offset : offset + nbytes].toreadonly()

    def _commit(self) -> bool:
        assert self._buffer is not None
        header = decode(self._buffer)
        check_identity(header, self.key, self.nbytes)
        header.verify(self._buffer[header.header_nbytes :])
        stored = self._tier._settle(_Resident(self.key, self._block, header))
        self._buffer = None
        return stored

    def _revoke(self) -> None:
        self._buffer = None
        self._tier._cancel(self.key, self._block)


class HostLease(TimedLease):
    """A lease on memory, which stays as it is for as long as a view of it lives."""

    def __init__(self, tier: HostTier, held: _Resident, terms: Terms) -> None:
        assert held.header is not None
        super().__init__(held.header, tier.name, terms)
        self._tier = tier
        self._view: memoryview | None = held.view()

    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        offset, nbytes = self.header.layer_range(first, count)
        self._require_held()
        view = self._view
        if view is None:
            raise self._released()
        return given(view[offset : offset + nbytes], into)

    def _let_go(self) -> None:
        self._view = None

    def _used(self) -> None:
        with self._tier._lock:
            self._tier._ledger.use(self.header.key)

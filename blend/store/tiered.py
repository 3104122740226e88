"""A tier made of tiers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from weakref import WeakValueDictionary

from blend.errors import Closed, InvalidConfig, InvalidInput, LeaseReleased, StoreError
from blend.store.base import Lease, Tier, TierStats, Writer, check_nbytes
from blend.store.buffers import Buffer
from blend.store.fanout import FanOutWriter
from blend.store.key import PLAIN, ObjectKey, check_content
from blend.store.layout import Header, encode
from blend.store.promotion import Promotion
from blend.types import Variant

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lookup:
    """What became of asking for an object.

    ``lease`` and ``tier`` are ``None`` unless a tier had it. ``reason`` names every tier that failed while it was
    asked, and how; it is empty when none did, so that a miss with a reason is a fault. ``fault`` is the last error.
    """

    lease: Lease | None
    tier: str | None
    reason: str = ""
    fault: StoreError | None = None


class TieredStore(Tier):
    """Several tiers as one, which owns and closes them. A fault in one is counted and the others go on.

    Reading asks them in turn; an object that comes from a slower one enters the fastest when its lease has read all
    layers. Writing goes through to all. With no tiers at all every look-up is a miss.

    Args:
        tiers: fastest first, with different names.
        name: what reports call the whole.

    Raises:
        InvalidConfig: two tiers have one name.
    """

    def __init__(self, tiers: Sequence[Tier], name: str = "tiered") -> None:
        self.name = name
        self.tiers = tuple(tiers)
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise InvalidConfig("tiers", names, "tiers with different names")
        self._lock = threading.Lock()
        # At most one promotion a key; its lease keeps it alive.
        self._promoting: WeakValueDictionary[ObjectKey, Promotion] = WeakValueDictionary()
        self._hits = self._misses = self._failures = 0
        self._closed = False

    def put(self, header: Header, payload: Buffer) -> bool:
        """Store a copy of ``payload`` in every tier that lacks the object; return False when any had it already.

        A tier that fails is counted and left out. When this returns, tiers that took the object have committed it.

        Raises:
            InvalidInput, ObjectCorrupt: as for any tier.
            ResourceExhausted, TierUnavailable: no tier took it; the last one's reason.
        """
        view, head = header.check_payload(payload), encode(header)
        with self._start(header.key, header.object_nbytes) as writer:
            if not writer.live:
                return False
            writer.write(0, head)
            writer.write(len(head), view)
            return writer.commit()

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        """Reserve space in every tier that lacks the object; otherwise as for any tier, and as :meth:`put`."""
        return self._start(key, nbytes)

    def _start(self, key: ObjectKey, nbytes: int) -> FanOutWriter:
        check_nbytes(nbytes)
        self._require_open()
        return FanOutWriter(self.tiers, key, nbytes, self.count_fault)

    def lookup(self, key: ObjectKey) -> Lookup:
        """Ask the tiers in turn, fastest first; return a lease on the first copy, and what failed on the way."""
        self._require_open()
        faults: list[StoreError] = []
        promotion = None
        for place, tier in enumerate(self.tiers):
            if place == 1:
                promotion = self._enlist(key)
            try:
                lease = tier.get(key)
            except StoreError as error:
                self.count_fault(tier.name, error)
                faults.append(error)
                continue
            if lease is not None:
                with self._lock:
                    self._hits += 1
                return Lookup(_TieredLease(self, lease, promotion), tier.name, *_told(faults))
        if not faults:
            with self._lock:
                self._misses += 1
        return Lookup(None, None, *_told(faults))

    def get(self, key: ObjectKey) -> Lease | None:
        """Return a lease on the first copy; raise the last tier's fault when there is none and one failed."""
        found = self.lookup(key)
        if found.lease is None and found.fault is not None:
            raise found.fault
        return found.lease

    def resolve(self, content: str, variant: Variant) -> ObjectKey | None:
        """Return the key of a stored variant of a content key, or ``None``; a hint, without a lease.

        ``best`` prefers a conditioned variant wherever it is; of several, the fastest tier's first in order is taken.

        Raises:
            InvalidInput: not a content key, or no such variant.
        """
        check_content("content", content)
        if variant not in ("plain", "conditioned", "best"):
            raise InvalidInput("variant", variant, "plain, conditioned or best")
        self._require_open()
        plain = None
        for tier in self.tiers:
            for name in self._variants(tier, content):
                if name == PLAIN:
                    plain = ObjectKey(content, PLAIN)
                elif variant != "plain":
                    return ObjectKey(content, name)
        return plain if variant != "conditioned" else None

    def contains(self, key: ObjectKey) -> bool:
        self._require_open()
        return any(self._contains(tier, key) for tier in self.tiers)

    def variants(self, content: str) -> tuple[str, ...]:
        check_content("content", content)
        self._require_open()
        return tuple(sorted({name for tier in self.tiers for name in self._variants(tier, content)}))

    def remove(self, key: ObjectKey) -> bool:
        """Remove the object from every tier; return False when none has it.

        Raises:
            TierUnavailable: a tier failed and may still have it; the others have removed it.
        """
        self._require_open()
        removed, fault = False, None
        # Slowest first: a promotion reads from these, so that none can begin once they have been asked; what is
        # under way is then cancelled, or done and removed with the rest.
        for tier in reversed(self.tiers):
            if tier is self.tiers[0]:
                self._cancel_promotion(key)
            try:
                removed = tier.remove(key) or removed
            except StoreError as error:
                self.count_fault(tier.name, error)
                fault = error
        if fault is not None:
            raise fault
        return removed

    def keys(self) -> Iterator[ObjectKey]:
        self._require_open()
        return iter(dict.fromkeys(chain.from_iterable(tier.keys() for tier in self.tiers)))

    def stats(self) -> TierStats:
        """Return the whole's state: distinct objects, bytes summed over tiers, and what callers of this store saw."""
        self._require_open()
        parts, keys = self.tier_stats(), list(self.keys())
        with self._lock:
            return TierStats(
                name=self.name,
                objects=len(keys),
                used_bytes=sum(part.used_bytes for part in parts),
                capacity_bytes=sum(part.capacity_bytes for part in parts),
                hits=self._hits,
                misses=self._misses,
                failures=self._failures,
                evictions=sum(part.evictions for part in parts),
                quarantined=sum(part.quarantined for part in parts),
            )

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Return every tier's own state and counts, fastest first."""
        return tuple(tier.stats() for tier in self.tiers)

    def check_integrity(self) -> None:
        self._require_open()
        for tier in self.tiers:
            tier.check_integrity()

    def close(self) -> None:
        self._closed = True
        with ExitStack() as stack:
            for tier in self.tiers:
                stack.callback(tier.close)

    def count_fault(self, tier: str, error: Exception) -> None:
        """Count and log a fault in one of the tiers."""
        with self._lock:
            self._failures += 1
        _log.warning("%s: %s failed: %s", self.name, tier, error)

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the store has been closed")

    def _contains(self, tier: Tier, key: ObjectKey) -> bool:
        try:
            return tier.contains(key)
        except StoreError as error:
            self.count_fault(tier.name, error)
            return False

    def _variants(self, tier: Tier, content: str) -> tuple[str, ...]:
        try:
            return tier.variants(content)
        except StoreError as error:
            self.count_fault(tier.name, error)
            return ()

    def _enlist(self, key: ObjectKey) -> Promotion | None:
        """Return a promotion of ``key`` to the fastest tier, unless another lease is about to do it."""
        with self._lock:
            other = self._promoting.get(key)
            if other is not None and not other.over:
                return None
            promotion = Promotion(self.tiers[0], self.count_fault)
            self._promoting[key] = promotion
            return promotion

    def _cancel_promotion(self, key: ObjectKey) -> None:
        with self._lock:
            promotion = self._promoting.get(key)
        if promotion is not None:
            promotion.cancel()


def _told(faults: Sequence[StoreError]) -> tuple[str, StoreError | None]:
    return "; ".join(str(fault) for fault in faults), faults[-1] if faults else None


class _TieredLease(Lease):
    """A tier's lease that counts its faults, and promotes the object when it reads all of it."""

    def __init__(self, store: TieredStore, inner: Lease, promotion: Promotion | None) -> None:
        super().__init__(inner.header, inner.tier)
        self._store = store
        self._inner = inner
        self._promotion = promotion
        self._promoted: Lease | None = None

    def layer(self, layer: int, into: memoryview | None = None) -> memoryview:
        try:
            view = (self._promoted or self._inner).layer(layer, into)
        except StoreError as error:
            self._count(error)
            raise
        if self._promotion is not None and into is None:
            self._promotion.offer(self.header, layer, view)
        return view

    def payload(self, into: memoryview | None = None) -> memoryview:
        try:
            if self._promotion is not None and self._promoted is None:
                self._promoted = self._promotion.read_through(self._inner)
            return (self._promoted or self._inner).payload(into)
        except StoreError as error:
            self._count(error)
            raise

    def release(self) -> None:
        self._inner.release()
        if self._promotion is not None:
            self._promotion.cancel()
        if self._promoted is not None:
            self._promoted.release()

    def _count(self, error: StoreError) -> None:
        if not isinstance(error, LeaseReleased):
            self._store.count_fault(self.tier, error)

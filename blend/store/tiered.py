"""A tier made of tiers."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TypeVar
from weakref import WeakValueDictionary

from blend.errors import Closed, InvalidConfig, InvalidInput, ObjectCorrupt, StoreError
from blend.store.base import Lease, Tier, TierStats, Writer, check_nbytes
from blend.store.buffers import Buffer
from blend.store.fanout import FanOutWriter
from blend.store.flight import SingleFlight
from blend.store.key import ObjectKey, check_content, check_tag
from blend.store.layout import Header, encode
from blend.store.loading import Loader, Loads, LoadStats
from blend.store.lookup import Found, Lookup, TieredLease, told
from blend.store.namespaces import Dropped, NamespaceUsage, Track, drop, usage_by_namespace
from blend.store.node import ResidencyNode
from blend.store.policy import DEFAULT_POLICY, Policy
from blend.store.promotion import Gate, Gates, Promotion
from blend.store.resolving import resolve
from blend.store.stored import Stored, WriteStats
from blend.store.tenants import Tenants, TenantUsage
from blend.store.writing import Writing
from blend.types import Variant

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class TieredStore(Tier):
    """Several tiers as one, which owns and closes them. A fault in one is counted and the others go on.

    Reading asks them in turn; an object that comes from a slower one enters the fastest when its lease has read all
    layers. Writing goes to all, or to the fastest first, as the policy says. With no tiers at all every look-up is a
    miss.

    Args:
        tiers: fastest first, with different names.
        name: what reports call the whole.
        policy: how it writes and prefetches.
        residency: what the tiers tell of themselves, and what other nodes tell; owned like them.
        known: the tenants that its users name; by default with a secret of its own, which no key was made with.

    Raises:
        InvalidConfig: two tiers have one name, or the policy needs a fastest tier of another kind.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        name: str = "tiered",
        policy: Policy = DEFAULT_POLICY,
        residency: ResidencyNode | None = None,
        known: Tenants | None = None,
    ) -> None:
        self.name = name
        self.tiers = tuple(tiers)
        self.residency = residency
        self.known = known or Tenants(os.urandom(32))
        self.policy = policy
        self.persistent = any(tier.persistent for tier in self.tiers)
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise InvalidConfig("tiers", names, "tiers with different names")
        self._lock = threading.Lock()
        # At most one promotion a key; its lease keeps it alive.
        self._promoting: WeakValueDictionary[ObjectKey, Promotion] = WeakValueDictionary()
        self._gates = Gates()
        self._hits = self._misses = self._failures = 0
        self._closed = False
        self._writing = Writing(self.tiers, policy, self._gates, self.count_fault, name)
        first = self.tiers[0] if self.tiers and self.tiers[0].in_memory else None
        self._loader = Loader(first, policy, self.count_fault, name)
        self._flights: SingleFlight[ObjectKey, None] = SingleFlight()

    def put(self, header: Header, payload: Buffer) -> bool:
        """Store a copy of ``payload`` in every tier that lacks the object; return False when any had it already.

        A tier that fails is counted and left out. When this returns, tiers that took the object have committed it.
        Under another write policy than ``write_through`` that is the fastest one, unless it does not take the object.

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

    def put_async(self, header: Header, payload: Buffer) -> Stored:
        """Store a copy of ``payload`` and return its three events, as futures.

        The copy is made before this returns; the write to lower tiers, with retries, is the store's own thread's.
        When the budget for what waits there is used up, the caller does it: nothing waits without bound.

        Raises:
            InvalidInput, ObjectCorrupt: as for any tier.
        """
        encode(header)
        self._require_open()
        return self._writing.put(header, payload, self.put)

    def get_or_put(
        self, key: ObjectKey, compute: Callable[[], tuple[Header, Buffer]], timeout: float | None = None
    ) -> Lease | None:
        """Return a lease on an object that is computed and stored if it is missing: once, however many ask at once.

        Whoever asks first computes; the others wait, for ``timeout`` seconds at most. If that one fails, it is told
        so, and one of the others takes over. ``None`` if the object was evicted or removed again at once.

        Raises:
            ResourceExhausted: it was not there in time, or no tier has room for it.
            StoreError: no tier took it, or one failed that may have it.
        """
        lease = self.lookup(key).lease
        if lease is None:

            def work() -> None:
                if not self.contains(key):
                    self.put(*compute())

            self._flights.run(key, work, timeout)
            lease = self.get(key)
        return lease

    def load(
        self, keys: Iterable[ObjectKey], tokens: int | None = None, wrong: Callable[[Header], str] = lambda header: ""
    ) -> Loads:
        """Begin to load objects that are not in memory, all their first layers first; return leases on those found.

        Args:
            keys: which; the order is that in which each layer is read.
            tokens: how long the request is, for the prefetch policy ``timeout``; ``None`` counts what is loaded.
            wrong: why an object is not what its key stands for, or an empty string. A key is only a claim: what is
                wrong counts as a fault of its tier, and is not read.

        Raises:
            Closed: the store has been closed.
        """
        ready: dict[ObjectKey, Lease] = {}
        slow: list[tuple[Lease, Gate]] = []
        missed: dict[ObjectKey, str] = {}
        wanted = tuple(dict.fromkeys(keys))
        for tier in self.tiers[1:]:
            tier.expect(key for key in wanted if not self._contains(self.tiers[0], key))
        for key in wanted:
            found = self._find(key, wrong)
            if found.lease is None:
                missed[key] = found.reason
            elif found.gate is None and self.tiers[0].in_memory:
                ready[key] = found.lease
            else:
                slow.append((found.lease, found.gate or self._gates.open(key)))
        return self._loader.load(ready, slow, missed, tokens)

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        """Reserve space in the tiers that the policy writes to and that lack the object; otherwise as any tier."""
        return self._start(key, nbytes)

    def _start(self, key: ObjectKey, nbytes: int) -> FanOutWriter:
        check_nbytes(nbytes)
        self._require_open()
        return self._writing.writer(key, nbytes)

    def lookup(self, key: ObjectKey) -> Lookup:
        """Ask the tiers in turn, fastest first; return a lease on the first copy, and what failed on the way."""
        found = self._find(key)
        if found.lease is None:
            return Lookup(None, None, found.reason, found.fault)
        promotion = self._enlist(key, found.gate) if found.gate is not None else None
        return Lookup(TieredLease(self.count_fault, found.lease, promotion), found.tier, found.reason, found.fault)

    def _find(self, key: ObjectKey, wrong: Callable[[Header], str] = lambda header: "") -> Found:
        """Ask the tiers in turn for a lease of their own, on an object that is not ``wrong``."""
        self._require_open()
        faults: list[StoreError] = []
        gate = None
        for place, tier in enumerate(self.tiers):
            if place == 1:
                gate = self._gates.open(key)
            try:
                lease = tier.get(key)
                if lease is not None and (reason := wrong(lease.header)):
                    lease.release()
                    raise ObjectCorrupt(f"{tier.name}: {reason}")
            except StoreError as error:
                self.count_fault(tier.name, error)
                faults.append(error)
                continue
            if lease is not None:
                with self._lock:
                    self._hits += 1
                if place == 0:
                    self._writing.hit(key)
                return Found(lease, tier.name, *told(faults), gate)
        if not faults:
            with self._lock:
                self._misses += 1
        return Found(None, None, *told(faults), None)

    def get(self, key: ObjectKey) -> Lease | None:
        """Return a lease on the first copy; raise the last tier's fault when there is none and one failed."""
        found = self.lookup(key)
        if found.lease is None and found.fault is not None:
            raise found.fault
        return found.lease

    def resolve(self, content: str, variant: Variant) -> ObjectKey | None:
        """Return the key of a stored variant of a content key, or ``None``; a hint, without a lease.

        ``best`` prefers a conditioned variant wherever it is; of several, the fastest tier's first in order is taken.

        Slower tiers are asked only where they can change the answer. Where asking costs a round trip, or a lease, that
        is where no faster tier has the plain variant: it finds no other one (see :mod:`blend.store.resolving`).

        Raises:
            InvalidInput: not a content key, or no such variant.
            StoreError: nothing was found, and a tier failed that may have it.
        """
        check_content("content", content)
        if variant not in ("plain", "conditioned", "best"):
            raise InvalidInput("variant", variant, "plain, conditioned or best")
        self._require_open()
        name = resolve(self.tiers, content, variant, self.count_fault)
        return None if name is None else ObjectKey(content, name)

    def contains(self, key: ObjectKey) -> bool:
        self._require_open()
        return any(self._contains(tier, key) for tier in self.tiers)

    def variants(self, content: str) -> tuple[str, ...]:
        check_content("content", content)
        self._require_open()
        return _united(self._ask(lambda tier: tier.variants(content)))

    def recall(self, content: str) -> tuple[str, ...]:
        """Return the variants that the tiers can tell without a round trip, sorted."""
        check_content("content", content)
        self._require_open()
        return _united(self._ask(lambda tier: tier.recall(content)))

    def remove(self, key: ObjectKey) -> bool:
        """Remove the object from every tier; return False when none has it.

        Raises:
            TierUnavailable: a tier failed and may still have it; the others have removed it.
        """
        self._require_open()
        removed, faults = self._remove(key)
        if faults:
            raise list(faults.values())[-1]
        return bool(removed)

    def _remove(self, key: ObjectKey) -> tuple[list[str], dict[str, StoreError]]:
        """Remove the object; return the names of the tiers that had it, and the faults of those that failed."""
        removed: list[str] = []
        faults: dict[str, StoreError] = {}
        with self._gates.removing(key):  # no copy of it is made meanwhile
            self._writing.forget(key)
            for tier in self.tiers:
                try:
                    if tier.remove(key):
                        removed.append(tier.name)
                except StoreError as error:
                    self.count_fault(tier.name, error)
                    faults[tier.name] = error
        return removed, faults

    def drop(self, tag: str, track: Track = iter) -> Dropped:
        """Remove every object of a tenant or namespace from every tier; return what went, and what could not be.

        None is found any more then. Those under a lease are read to its end, and copies of them that were under way
        come to nothing. What is put while this runs, here or by another process, may be there afterwards.

        Args:
            tag: 12 hex digits of a tenant, whatever the model, or 18 of a namespace.
            track: is given the keys to remove, and yields them: for a progress bar.

        Raises:
            InvalidInput: not a tag.
        """
        check_tag("namespace", tag)
        self._require_open()
        with self._gates.dropping(tag):
            return drop(tag, self.tiers, self._remove, track)

    def namespaces(self) -> tuple[NamespaceUsage, ...]:
        """Return what each namespace has in each tier, in order of their tags."""
        self._require_open()
        return usage_by_namespace(self.tiers, self.count_fault)

    def headers(self, keys: Iterable[ObjectKey]) -> Iterator[Header]:
        """Iterate over headers of these objects, each from the fastest tier that tells it; a tier that fails is left
        out."""
        self._require_open()
        left = dict.fromkeys(keys)
        found: list[Header] = []

        def take(tier: Tier) -> None:
            for header in tier.headers(tuple(left)):
                del left[header.key]
                found.append(header)

        self._ask(take)
        return iter(found)

    def tenants(self) -> tuple[TenantUsage, ...]:
        """Return what every tenant holds in all tiers together; its quota is that of a single one."""
        self._require_open()
        shares: Counter[str] = Counter()
        quotas: dict[str, int | None] = {}
        for usage in chain.from_iterable(self._ask(lambda tier: tier.tenants())):
            shares[usage.tenant] += usage.used_bytes
            quotas[usage.tenant] = usage.quota_bytes
        return tuple(TenantUsage(tenant, nbytes, quotas[tenant]) for tenant, nbytes in shares.most_common())

    def lingering(self, tag: str) -> int:
        self._require_open()
        return sum(self._ask(lambda tier: tier.lingering(tag)))

    def pin(self, key: ObjectKey, seconds: float | None = None) -> bool:
        """Protect an object in every tier that has it; return whether any could."""
        self._require_open()
        return any(self._ask(lambda tier: tier.pin(key, seconds)))

    def unpin(self, key: ObjectKey) -> bool:
        self._require_open()
        return any(self._ask(lambda tier: tier.unpin(key)))

    def keys(self) -> Iterator[ObjectKey]:
        """Iterate over the keys that are in any tier now; those of a tier that fails are left out."""
        self._require_open()
        return iter(dict.fromkeys(chain.from_iterable(self._ask(lambda tier: list(tier.keys())))))

    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        """Iterate over the objects of all tiers with their bytes; those of a tier that fails are left out."""
        self._require_open()
        listed = self._ask(lambda tier: list(tier.sizes()))
        return iter(dict(chain.from_iterable(reversed(listed))).items())

    def stats(self) -> TierStats:
        """Return the whole's state: distinct objects, bytes summed over tiers, and what callers of this store saw.

        It is down when all its tiers are.
        """
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
                down="; ".join(part.down for part in parts) if all(part.down for part in parts) else "",
            )

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Return every tier's own state and counts, fastest first; one that cannot tell them is down, and says why."""
        return tuple(_stats_of(tier) for tier in self.tiers)

    def write_stats(self) -> WriteStats:
        """Return what writing to lower tiers has done, its staging budget and its errors."""
        return self._writing.stats()

    def load_stats(self) -> LoadStats:
        """Return what loading from lower tiers has done, and its in-flight budget."""
        stats = self._loader.stats()
        return replace(stats, joined=stats.joined + self._flights.joined)

    def flush(self) -> int:
        """Write down what is in the fastest tier alone, where the policy is ``write_back``; return how many objects.

        What no lower tier takes stays where it is, and is not evicted.
        """
        self._require_open()
        return self._writing.flush()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no write and no load is under way; return whether that is so (``timeout`` in seconds, each)."""
        return self._writing.wait_idle(timeout) and self._loader.wait_idle(timeout)

    def check_integrity(self) -> None:
        self._require_open()
        for tier in self.tiers:
            tier.check_integrity()

    def close(self) -> None:
        """Fail what is being loaded, finish what is being written, close every tier, then tell no one any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loader.close()
        self._writing.close()
        with ExitStack() as stack:
            if self.residency is not None:
                stack.callback(self.residency.close)  # after the tiers, whose last events it sends
            for tier in self.tiers:
                stack.callback(tier.close)

    def count_fault(self, tier: str, error: Exception) -> None:
        """Count and log a fault in one of the tiers."""
        with self._lock:
            self._failures += 1
        # As text: whatever keeps the record would keep the error, its frames and the views in them.
        _log.warning("%s: %s failed: %s", self.name, tier, str(error))

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the store has been closed")

    def _contains(self, tier: Tier, key: ObjectKey) -> bool:
        try:
            return tier.contains(key)
        except StoreError as error:
            self.count_fault(tier.name, error)
            return False

    def _ask(self, question: Callable[[Tier], _Answer]) -> list[_Answer]:
        """Ask every tier, fastest first; return what they answer. One that fails is counted and left out."""
        answers = []
        for tier in self.tiers:
            try:
                answers.append(question(tier))
            except StoreError as error:
                self.count_fault(tier.name, error)
        return answers

    def _enlist(self, key: ObjectKey, gate: Gate) -> Promotion | None:
        """Return a promotion of ``key`` to the fastest tier, unless another lease is about to do it."""
        with self._lock:
            other = self._promoting.get(key)
            if other is not None and not other.gate.shut:
                return None
            promotion = Promotion(self.tiers[0], gate, self.count_fault)
            self._promoting[key] = promotion
            return promotion


def _stats_of(tier: Tier) -> TierStats:
    """Return a tier's state. That it cannot tell its figures is no fault of an object, and not counted as one."""
    try:
        return tier.stats()
    except StoreError as error:
        return TierStats(tier.name, 0, 0, 0, 0, 0, 0, 0, down=str(error))


def _united(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(parts))))

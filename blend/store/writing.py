"""How objects reach the tiers below the fastest: at once, once they are wanted again, or when they are evicted."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from blend.errors import Closed, InvalidConfig, ObjectCorrupt, ResourceExhausted, StoreError, TierUnavailable
from blend.store.base import Lease, Tier
from blend.store.buffers import Buffer, allocate, bare
from blend.store.fanout import FanOutWriter
from blend.store.key import ObjectKey
from blend.store.layout import Header
from blend.store.policy import Policy
from blend.store.promotion import Gate, Gates, copy_object
from blend.store.stored import StagedLease, Stored, WriteStats
from blend.worker import Allowance, Worker

_log = logging.getLogger(__name__)
_MAX_JOBS = 1024
_MAX_COUNTED = 1 << 16

OnFault = Callable[[str, Exception], None]


class _Mark:
    """That one put of an object is in the fastest tier alone; another put of the same key has another mark."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Writing:
    """The write policy of one tiered store.

    Args:
        tiers: fastest first.
        policy: which, and its budgets.
        gates: shared with whatever else copies or removes objects of this store.
        on_fault: told the name of a tier that failed, and the error.
        name: of the store, for the thread's name.

    Raises:
        InvalidConfig: ``write_back`` over a fastest tier that evicts without asking.
    """

    def __init__(self, tiers: Sequence[Tier], policy: Policy, gates: Gates, on_fault: OnFault, name: str) -> None:
        self._tiers = tuple(tiers)
        self._policy = policy
        self._gates = gates
        self._on_fault = on_fault
        self._through = policy.write == "write_through" or len(self._tiers) < 2
        self._back = policy.write == "write_back" and not self._through
        self._staging = Allowance(policy.staging_bytes)
        self._worker = Worker(f"{name}-writer", _MAX_JOBS)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        # In the fastest tier alone, least recently used first. The tier is told not to evict them.
        self._dirty: OrderedDict[ObjectKey, _Mark] = OrderedDict()
        self._hits: OrderedDict[ObjectKey, int] = OrderedDict()
        self._errors = {"copied": 0, "readable": 0, "durable": 0}
        self._retries = 0
        if self._back and not self._tiers[0].keep_while(self._dirty.__contains__):
            raise InvalidConfig("policy.write", policy.write, f"another one: {self._tiers[0].name} evicts unasked")

    def writer(self, key: ObjectKey, nbytes: int) -> FanOutWriter:
        """Return a writer to the tiers that the policy writes to at once; otherwise as :class:`FanOutWriter`."""
        if self._through:
            return FanOutWriter(self._tiers, key, nbytes, self._on_fault)
        known = any(self._contains(tier, key) for tier in self._tiers[1:])
        if self._back:
            self._spill(self._dirty_bytes() + nbytes - self._capacity())
        for attempt in range(2):
            try:
                if self._back and not known:
                    around = partial(self._commit_dirty, key, nbytes)
                    return FanOutWriter(self._tiers[:1], key, nbytes, self._quiet, around=around)
                return FanOutWriter(self._tiers[:1], key, nbytes, self._quiet, known)
            except (StoreError, ResourceExhausted) as error:
                # What other objects' leases leave may be dirty: write all of that down, then ask once more.
                if attempt == 0 and self._back and isinstance(error, ResourceExhausted) and self.flush():
                    continue
                self._on_fault(self._tiers[0].name, error)
                break
        return FanOutWriter(self._tiers[1:], key, nbytes, self._on_fault)

    def put(self, header: Header, payload: Buffer, put: Callable[[Header, Buffer], bool]) -> Stored:
        """Copy an object into the fastest tier, and let the thread write it to the others; ``put`` does all at once.

        Without room in the staging budget, or in the queue, the caller does it.

        Raises:
            InvalidInput, ObjectCorrupt: as for any tier.
        """
        view, events = header.check_payload(payload), Stored()
        if not self._through or len(self._tiers) < 2 or not self._staging.take(header.object_nbytes):
            self._put_now(header, view, put, events)
            return events
        gate = self._gates.open(header.key)
        try:
            source = self._first_copy(header, view, events)
        except BaseException:
            self._staging.give(header.object_nbytes)
            raise

        def job() -> None:
            try:
                self._finish(source, gate, events)
            except Exception as error:
                if not events.durable.done():  # somebody waits for it
                    self._fail(events, "durable", error)
                raise
            finally:
                self._staging.give(header.object_nbytes)

        if not self._worker.submit(job):
            job()
        return events

    def hit(self, key: ObjectKey) -> None:
        """Count that the fastest tier served an object."""
        if self._through:
            return
        with self._lock:
            if key in self._dirty:
                self._dirty.move_to_end(key)
            if self._back:
                return
            count = self._hits.pop(key, 0) + 1
            self._hits[key] = count
            while len(self._hits) > _MAX_COUNTED:
                self._hits.popitem(last=False)
        if count == self._policy.write_hits:
            self._worker.submit(partial(self._write_down, key))

    def forget(self, key: ObjectKey) -> None:
        """Take an object that is being removed off every list."""
        with self._lock:
            self._dirty.pop(key, None)
            self._hits.pop(key, None)

    def flush(self) -> int:
        """Write down everything that is in the fastest tier alone; return how many objects are not any more."""
        return self._spill(self._dirty_bytes())

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until the thread has nothing to do; return whether that is so (``timeout`` in seconds)."""
        return self._worker.wait_idle(timeout)

    def stats(self) -> WriteStats:
        """Return counts and what is used of the budgets."""
        with self._lock:
            return WriteStats(
                staging_bytes=self._staging.used,
                staging_capacity_bytes=self._staging.nbytes,
                staging_peak_bytes=self._staging.peak,
                waiting=self._worker.waiting,
                dirty=len(self._dirty),
                dirty_bytes=sum(mark.nbytes for mark in self._dirty.values()),
                copied_errors=self._errors["copied"],
                readable_errors=self._errors["readable"],
                durable_errors=self._errors["durable"],
                retries=self._retries,
            )

    def close(self) -> None:
        """Finish what is queued, write down what is dirty, and end the thread. Safe to call again."""
        self._stopping.set()
        self._worker.close()
        self.flush()

    def _commit_dirty(self, key: ObjectKey, nbytes: int, commit: Callable[[], bool]) -> bool:
        """Commit to the fastest tier, which is told to keep the object before it could be evicted."""
        mark = _Mark(nbytes)
        with self._lock:
            self._dirty.setdefault(key, mark)
        stored = False
        try:
            stored = commit()
        finally:
            with self._lock:
                if stored:
                    self._dirty.setdefault(key, mark)  # a removal meanwhile was of what was there before
                elif self._dirty.get(key) is mark and not self._contains(self._tiers[0], key):
                    del self._dirty[key]
        return stored

    def _quiet(self, tier: str, error: Exception) -> None:
        _log.debug("%s: %s", tier, str(error))

    def _contains(self, tier: Tier, key: ObjectKey) -> bool:
        try:
            return tier.contains(key)
        except StoreError as error:
            self._on_fault(tier.name, error)
            return False

    def _dirty_bytes(self) -> int:
        with self._lock:
            return sum(mark.nbytes for mark in self._dirty.values())

    def _capacity(self) -> int:
        return self._tiers[0].stats().capacity_bytes

    def _spill(self, nbytes: int) -> int:
        """Write down dirty objects, least recently used first, until ``nbytes`` are clean; return how many are."""
        with self._lock:
            dirty = list(self._dirty.items())
        done = 0
        for key, mark in dirty:
            if nbytes <= 0:
                break
            if self._write_down(key):
                done += 1
                nbytes -= mark.nbytes
        return done

    def _write_down(self, key: ObjectKey) -> bool:
        """Copy an object from the fastest tier to the others; return whether it need not be kept there any more."""
        with self._lock:
            mark = self._dirty.get(key)
        gate = self._gates.open(key)
        try:
            lease = self._tiers[0].get(key)
            if lease is None:
                return False
            with lease:
                if not self._copy_down(lease, gate):
                    return False
        except (StoreError, ResourceExhausted) as error:
            self._on_fault(self._tiers[0].name, error)
            return False
        with self._lock:
            if mark is not None and self._dirty.get(key) is mark:
                del self._dirty[key]
        return True

    def _copy_down(self, lease: Lease, gate: Gate) -> bool:
        """Copy an object to every lower tier; return whether any has it then. Faults are counted."""
        taken = False
        for tier in self._tiers[1:]:
            try:
                taken = self._with_retries(tier, lease, gate) or taken
            except (StoreError, ResourceExhausted) as error:
                self._on_fault(tier.name, error)
        return taken

    def _with_retries(self, tier: Tier, lease: Lease, gate: Gate) -> bool:
        for attempt in range(self._policy.write_retries + 1):
            try:
                return copy_object(lease, tier, gate)
            except TierUnavailable as error:
                if attempt == self._policy.write_retries:
                    raise
                _log.debug("%s: attempt %d failed: %s", tier.name, attempt + 1, str(error))
                with self._lock:
                    self._retries += 1
                # A store that closes goes on trying, without the pauses.
                self._stopping.wait(self._policy.retry_seconds * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _put_now(self, header: Header, view: memoryview, put: Callable[[Header, Buffer], bool], events: Stored) -> None:
        try:
            stored = put(header, view)
        except (StoreError, ResourceExhausted) as error:
            if isinstance(error, ObjectCorrupt):
                raise
            for name in ("copied", "readable", "durable"):
                self._fail(events, name, error)
            return
        events.copied.set_result(True)
        events.readable.set_result(stored)
        events.durable.set_result(any(t.persistent and self._contains(t, header.key) for t in self._tiers))

    def _first_copy(self, header: Header, view: memoryview, events: Stored) -> Lease:
        """Copy an object into the fastest tier, or aside where that does not take it; return a lease on the copy."""
        first = self._tiers[0]
        try:
            events.readable.set_result(first.put(header, view))
            lease = first.get(header.key)
            if lease is not None:
                with lease:
                    copy = lease.payload()  # outlives the lease, whose time may end while this is queued
                events.copied.set_result(True)
                return StagedLease(lease.header, copy)
        except ObjectCorrupt:
            raise
        except (StoreError, ResourceExhausted) as error:
            self._on_fault(first.name, error)
            if not events.readable.done():
                self._fail(events, "readable", error)
        header.verify(view)
        staged = allocate(header.payload_nbytes).data
        staged[:] = view
        events.copied.set_result(True)
        return StagedLease(header, staged.toreadonly())

    def _finish(self, source: Lease, gate: Gate, events: Stored) -> None:
        durable, fault = False, None
        with source:
            for tier in self._tiers[1:]:
                try:
                    if self._with_retries(tier, source, gate):
                        durable = durable or tier.persistent
                except (StoreError, ResourceExhausted, Closed) as error:
                    self._on_fault(tier.name, error)
                    fault = error
        if fault is not None and not durable:
            self._fail(events, "durable", fault)
        else:
            events.durable.set_result(durable)

    def _fail(self, events: Stored, name: str, error: Exception) -> None:
        with self._lock:
            self._errors[name] += 1
        getattr(events, name).set_exception(bare(error))

"""Loading several objects at once from slower tiers, layer by layer, on a thread of its own.

A request needs layer 0 of all its chunks before layer 1 of any. So the thread reads in that order, and the lease on
an object hands out each layer as soon as it is there and verified, while later ones are still on their way. The first
two layers are read one at a time, later ones in steps that grow, for each step has its cost and nobody waits for them
yet. What is read goes straight into the fastest tier where that takes it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from blend.errors import Closed, LeaseReleased, ResourceExhausted, StoreError, TierUnavailable
from blend.store.base import Lease, Tier
from blend.store.buffers import bare
from blend.store.key import ObjectKey
from blend.store.layout import Header
from blend.store.loadlease import LoadingLease
from blend.store.policy import Policy
from blend.store.promotion import Gate
from blend.worker import Allowance, Worker

_MAX_GROUPS = 256
_STEP_NBYTES = 4 << 20
"""Most of an object that is read in one step, unless one layer is more: what a reader may have to wait for."""


@dataclass(frozen=True)
class LoadStats:
    """What loading has done: bytes in flight now, at most, and allowed; groups of objects that wait; objects that were
    loaded, that failed, and that nobody waited for in the end.

    Of those, ``late`` were not there in the time that the prefetch policy gives, ``expired`` failed since the lease
    that they were read under had ended. ``joined`` had been brought, or were being made, for another request already.
    """

    inflight_bytes: int
    inflight_capacity_bytes: int
    inflight_peak_bytes: int
    waiting: int
    loaded: int
    failed: int
    dropped: int
    late: int = 0
    expired: int = 0
    joined: int = 0


class Loads(Mapping[ObjectKey, Lease]):
    """Objects that are being loaded for one request, by key: those that were found. A context manager.

    Leases from the fastest tier can be read at once, the others while they come (:class:`LoadingLease`). Leaving it
    releases all of them; what has not been read by then is not read any more.

    Attributes:
        missed: why each of the other keys is not here: which tiers failed, and how; empty when it is not stored.
        late: those of them that were not there in the time that the prefetch policy gives.
    """

    def __init__(
        self,
        leases: Mapping[ObjectKey, Lease],
        missed: Mapping[ObjectKey, str],
        seconds: float | None,
        count: Callable[[str], None],
        stall_seconds: float,
    ) -> None:
        self.missed = dict(missed)
        self.late: set[ObjectKey] = set()
        self._leases = dict(leases)
        self._count = count
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._stall = time.monotonic() + stall_seconds

    def __getitem__(self, key: ObjectKey) -> Lease:
        return self._leases[key]

    def __iter__(self) -> Iterator[ObjectKey]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self) -> None:
        """Wait, as long as the prefetch policy says, until work on these objects can begin; drop those it is not for.

        Under ``wait_complete`` it can begin with the first layer of each: later ones are waited for as they are read.
        Otherwise it is :meth:`settle`.
        """
        if self._deadline < math.inf:
            self.settle()
        else:
            self._drop(self._stall, layers=1)

    def settle(self) -> dict[ObjectKey, str]:
        """Wait as long as the prefetch policy says; drop what is not all there by then, and return why, by key.

        What is left afterwards can be read without waiting; what was dropped is among :attr:`missed`.
        """
        return self._drop(self._deadline, layers=None)

    def _drop(self, deadline: float, layers: int | None) -> dict[ObjectKey, str]:
        """Drop every object that has failed, or of which so many layers (``None``: all) are not there in time."""
        dropped: dict[ObjectKey, str] = {}
        for key, lease in list(self._leases.items()):
            if isinstance(lease, LoadingLease) and (not lease.wait(deadline, layers) or lease.fault is not None):
                dropped[key] = str(lease.fault or f"{lease.tier} has not given it in time")
                del self._leases[key]
                if lease.fault is not None:
                    lease.release()
                    continue
                self._count("dropped")  # it goes on into the fastest tier, for whoever asks next
                if self._deadline < math.inf:
                    self._count("late")
                    self.late.add(key)
        self.missed.update(dropped)
        return dropped

    def close(self) -> None:
        """Release every lease; safe to call again."""
        for lease in self._leases.values():
            lease.release()

    def __enter__(self) -> Loads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Loader:
    """The thread that reads, and its budget. Objects are read in groups that fit it, one group after another.

    Args:
        target: the tier that takes what is read, if any.
        policy: budgets and times.
        on_fault: told the name of a tier that failed, and the error.
        name: of the store, for the thread's name.
    """

    def __init__(
        self, target: Tier | None, policy: Policy, on_fault: Callable[[str, Exception], None], name: str
    ) -> None:
        self._target = target
        self._policy = policy
        self._on_fault = on_fault
        self._allowance = Allowance(policy.inflight_bytes)
        self._worker = Worker(f"{name}-loader", _MAX_GROUPS)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("loaded", "failed", "dropped", "late", "expired", "joined"), 0)
        self._closed = False

    def load(
        self,
        ready: Mapping[ObjectKey, Lease],
        slow: Sequence[tuple[Lease, Gate]],
        missed: Mapping[ObjectKey, str],
        tokens: int | None,
    ) -> Loads:
        """Begin to load objects of slower tiers. Takes all leases over.

        Args:
            ready: the leases that can be read at once.
            slow: those to be read, each with the gate that was opened before it was looked up.
            missed: why other keys have no lease.
            tokens: what the timeout is worked out from; ``None`` counts those of the objects that are not ready.
        """
        count = sum(lease.header.tokens for lease, _ in slow) if tokens is None else tokens
        seconds = self._policy.prefetch_seconds(count)
        loading = [LoadingLease(lease, self._target, gate, self._on_fault) for lease, gate in slow]
        for group in self._groups(loading):
            for lease in group:
                if seconds is None:
                    lease.deadline = time.monotonic() + self._policy.stall_seconds
                elif self._policy.prefetch == "timeout":
                    lease.deadline = time.monotonic() + seconds
            if not self._worker.submit(lambda group=group: self._read(group)):  # type: ignore[misc]
                self._refuse(group, self._refusal())
        found = {**ready, **{lease.header.key: lease for lease in loading}}
        return Loads(found, missed, seconds, self._count, self._policy.stall_seconds)

    def stats(self) -> LoadStats:
        """Return counts and what is used of the budget."""
        with self._lock:
            return LoadStats(
                inflight_bytes=self._allowance.used,
                inflight_capacity_bytes=self._allowance.nbytes,
                inflight_peak_bytes=self._allowance.peak,
                waiting=self._worker.waiting,
                **self._counts,
            )

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being loaded; return whether that is so (``timeout`` in seconds)."""
        return self._worker.wait_idle(timeout)

    def close(self) -> None:
        """Fail what is being loaded, and end the thread. Safe to call again."""
        self._closed = True
        self._worker.close()

    def _groups(self, leases: Sequence[LoadingLease]) -> list[list[LoadingLease]]:
        """Return the leases in groups that fit the budget; what cannot, alone, is refused."""
        groups: list[list[LoadingLease]] = []
        room = 0
        for lease in leases:
            nbytes = lease.header.payload_nbytes
            if nbytes > self._allowance.nbytes:
                self._refuse(
                    [lease], ResourceExhausted(f"{nbytes} bytes are more than may be in flight; raise inflight_bytes")
                )
                continue
            if nbytes > room:
                groups.append([])
                room = self._allowance.nbytes
            groups[-1].append(lease)
            room -= nbytes
        return groups

    def _refusal(self) -> TierUnavailable | Closed:
        """Return why the thread takes no load."""
        if self._closed:
            return Closed("the store was closed before the load began")
        return TierUnavailable(f"no more loads are taken: {_MAX_GROUPS} are waiting, or no thread can be started")

    def _refuse(self, group: Sequence[LoadingLease], error: StoreError | ResourceExhausted | Closed) -> None:
        for lease in group:
            lease.fail(error)
            lease.end()
            self._count("failed")

    def _read(self, group: Sequence[LoadingLease]) -> None:
        """Read layer after layer of a group, and store what is whole."""
        nbytes = sum(lease.header.payload_nbytes for lease in group)
        if not self._allowance.take(nbytes):  # one group at a time is in flight, and each fits
            self._refuse(group, TierUnavailable("the budget of bytes in flight is used up"))
            return
        try:
            spans = _spans([lease.header for lease in group])
            _expect(group, spans[:1])
            for lease in group:
                self._step(lease, lease.begin)
                if lease.complete:
                    self._count("joined")
            for number, (first, count) in enumerate(spans):
                if number:  # nothing comes before the first layers
                    _expect(group, spans[1:3] if number == 1 else spans[number + 1 : number + 2])
                for lease in group:
                    self._step(lease, partial(lease.read, first, count))
        finally:
            try:
                for lease in group:
                    lease.fail(TierUnavailable("the load was given up"))
                    if lease.complete:
                        self._count("loaded")
                    lease.end()
            finally:
                self._allowance.give(nbytes)

    def _step(self, lease: LoadingLease, step: Callable[[], None]) -> None:
        """Take one step with an object."""
        if lease.over:
            return
        if self._closed:
            lease.fail(Closed("the store was closed during the load"))
            return
        try:
            lease.keep()
            step()
        except (StoreError, Closed) as error:
            if not isinstance(error, (LeaseReleased, Closed)):
                self._on_fault(lease.tier, error)
            lease.fail(bare(error))
            self._count("failed")
            if isinstance(error, LeaseReleased):
                self._count("expired")

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _expect(group: Sequence[LoadingLease], spans: Sequence[tuple[int, int]]) -> None:
    for first, count in spans:
        for lease in group:
            lease.expect(first, count)


def _spans(headers: Sequence[Header]) -> list[tuple[int, int]]:
    """Return ``(first, count)`` of the layers that each step reads of every object."""
    layers = max(header.layers for header in headers)
    most = max(_STEP_NBYTES // max(header.layer_nbytes for header in headers), 1)
    spans, first = [(0, 1)], 1
    while first < layers:
        count = min(first, most, layers - first)
        spans.append((first, count))
        first += count
    return spans

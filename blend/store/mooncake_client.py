"""The calls that the Mooncake tier makes, each with a deadline, before a circuit breaker, with codes made errors.

Facts about the library that this rests on: every call blocks, some for seconds when the other side is gone; a read
session remembers where an object's replicas are, so that its ranges cost no call to the master; a session outlives
the object, and then reads whatever is there now; ``put`` of a key that exists says 0 and stores nothing, while a put
session says -705. So no code is taken as proof of anything: lengths and checksums are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, TypeVar

from blend.config import MooncakeConfig
from blend.errors import BlendError, InvalidInput, ResourceExhausted, StoreError, TierUnavailable
from blend.store.breaker import Breaker
from blend.store.deadline import DeadlineWorkers
from blend.store.mooncake_link import Link, address_of
from blend.store.staging import Staging

NO_SPACE: Final = -200
INVALID: Final = -600
NO_REPLICA: Final = -702
NOT_READY: Final = -703
MISSING: Final = -704
EXISTS: Final = -705
LEASED: Final = -706
LEASE_EXPIRED: Final = -707
TRANSFER: Final = -800
RPC: Final = -900
TIMEOUT: Final = -901
_MEANING = {
    NO_SPACE: "no space in the store",
    INVALID: "the library refuses the parameters",
    NO_REPLICA: "no replica",
    NOT_READY: "being written",
    MISSING: "missing",
    EXISTS: "exists",
    LEASED: "leased",
    LEASE_EXPIRED: "the lease has expired",
    TRANSFER: "the transfer failed",
    RPC: "the master does not answer",
    TIMEOUT: "timed out",
}
_ABSENT = frozenset({NO_REPLICA, NOT_READY, MISSING})
_SECONDS_PER_BYTE = 0.02 / (1 << 20)
_BATCH = 32
_MAX_NEGATIVE = 100_000

T = TypeVar("T")


@dataclass
class _Read:
    """A range that somebody waits for. ``into`` is held until the transfer has ended, whoever still waits."""

    name: str
    offset: int
    into: memoryview
    done: threading.Event
    code: int = 0
    error: Exception | None = None


class MooncakeClient:
    """Objects by name in a Mooncake store. Every method may be called from any thread.

    Args:
        config: the tier's settings.
        make: returns a new, unjoined client of the library.
        name: whose it is; errors begin with it.

    Unless said otherwise methods raise :class:`TierUnavailable` when the store cannot be reached in time.
    """

    def __init__(self, config: MooncakeConfig, make: Callable[[], Any], name: str) -> None:
        self.name = name
        self.staging = Staging(name, config.staging_bytes)
        self.breaker = Breaker(name, threshold=3, cooldown=config.health_seconds * 2)
        self._config = config
        self._workers = DeadlineWorkers(f"blend-{name}", config.threads, waiting=256)
        self._lock = threading.Lock()
        self._negative: dict[str, float] = {}
        self._pending: deque[_Read] = deque()
        self.link = Link(config, make, self.staging, self.breaker, f"blend-{name}")

    @property
    def late_calls(self) -> int:
        """Calls that took longer than anybody waited for."""
        return self._workers.late

    def take(self, nbytes: int) -> memoryview:
        """Return a writable piece of staging memory; otherwise as :meth:`Staging.take`."""
        return self.staging.take(nbytes, self._config.deadline_seconds)

    def require_fits(self, nbytes: int) -> None:
        """Raise :class:`ResourceExhausted` if an object of ``nbytes`` is larger than the staging memory."""
        if nbytes > self.staging.capacity:
            raise ResourceExhausted(
                f"{self.name}: an object of {nbytes} bytes is larger than the staging memory "
                f"({self.staging.capacity} bytes); raise mooncake.staging_bytes"
            )

    def room(self, nbytes: int) -> memoryview:
        """As :meth:`take`, to read into: what is larger than the staging memory is a fault, not a budget used up."""
        try:
            return self.take(nbytes)
        except ResourceExhausted as error:
            raise TierUnavailable(f"{error}; raise mooncake.staging_bytes to read it") from error

    def covers(self, view: memoryview) -> bool:
        """Return whether ``view`` is in memory that has been registered."""
        return self.link.covers(view)

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store registered memory, part after part, as one object. Returns False when there is one of that name.

        Raises:
            ResourceExhausted: the store has no room.
        """
        pointers, sizes = [self._registered(part) for part in parts], [len(part) for part in parts]
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        total = sum(sizes)

        def session() -> int:
            client, held = self.link.client(), parts  # the memory is kept until the call returns
            code = int(client.batch_put_session_start([name], [total])[0])
            if code:
                return code
            moved = int(client.batch_put_from_multi_buffer_ranges([name], [pointers], [sizes], [offsets])[0])
            if moved != total:
                client.batch_put_session_revoke([name])
                return moved if moved < 0 else TRANSFER
            del held
            return int(client.batch_put_session_end([name])[0])

        code = self._call(f"putting {name}", session, total)
        with self._lock:
            self._negative.pop(name, None)
        if code in (EXISTS, INVALID, NOT_READY):  # INVALID: an earlier, late put of this process is not over yet
            return False
        if code:
            raise self._fault(code, f"putting {name}")
        return True

    def open(self, name: str) -> bool:
        """Begin to read an object. Returns False when it is missing, or its owner could not be reached lately."""
        if self._is_negative(name):
            return False
        code = self._call(
            f"looking up {name}",
            lambda: int(self.link.client().batch_get_session_start([name])[0]),
            undo=lambda _: self.link.end_session(name),
        )
        if code in _ABSENT:
            return False
        if code:
            raise self._fault(code, f"looking up {name}", name)
        return True

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Read a range of an opened object into staging memory. The bytes are untrusted.

        Reads that many threads ask for at once are made in one call.
        """
        self._registered(into)
        self.breaker.check()
        seconds = self._seconds(len(into))
        end = monotonic() + seconds
        read = _Read(name, offset, into, threading.Event())
        self._pending.append(read)
        self._workers.submit(self._serve, seconds)
        if not read.done.wait(max(end - monotonic(), 0.0)):
            self._workers.late += 1
            self.breaker.failed(f"no answer within {seconds:.1f} s")
            self._remember(name)
            raise TierUnavailable(f"{self.name}: reading {name}: no answer within {seconds:.1f} s")
        if read.error is not None:
            raise read.error
        if read.code != len(into):
            raise self._fault(read.code or TRANSFER, f"reading {name}", name)
        self.breaker.succeeded()

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects, leased ones too: readers elsewhere find out by their checksums. Returns which were there."""
        codes = self._call(
            f"removing {names[0]} and {len(names) - 1} more",
            lambda: [int(code) for code in self.link.client().batch_remove(list(names), True)],
        )
        for code, name in zip(codes, names, strict=True):
            if code and code not in _ABSENT:
                raise self._fault(code, f"removing {name}")
        return [code == 0 for code in codes]

    def exists(self, name: str) -> bool:
        """Return whether the master knows an object. It leases it, so ask only for what will be used."""
        if self._is_negative(name):
            return False
        found = self._call(f"looking up {name}", lambda: int(self.link.client().is_exist(name)))
        if found < 0 and found not in _ABSENT:
            raise self._fault(RPC, f"looking up {name}")
        return found == 1

    def close(self) -> None:
        """Leave the store when the last opened object has been let go of."""
        self.link.close(last=lambda: self._workers.close(self._config.deadline_seconds))

    def _serve(self) -> None:
        """Make one call for all reads that are waiting; a lease that ran out is taken again, once."""
        batch: list[_Read] = []
        try:
            while len(batch) < _BATCH:
                batch.append(self._pending.popleft())
        except IndexError:
            if not batch:
                return  # another call has taken them along
        try:
            client = self.link.client()
            _read_ranges(client, batch)
            again = [read for read in batch if read.code in (LEASE_EXPIRED, INVALID)]
            if again:
                names = list({read.name for read in again})
                client.batch_get_session_end(names)
                opened = dict(zip(names, client.batch_get_session_start(names), strict=True))
                _read_ranges(client, [read for read in again if opened[read.name] == 0])
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            for read in batch:
                read.error = error
        finally:
            for read in batch:
                read.done.set()

    def _call(
        self, doing: str, function: Callable[[], T], nbytes: int = 0, undo: Callable[[T], None] | None = None
    ) -> T:
        self.breaker.check()
        try:
            value = self._workers.call(doing, function, self._seconds(nbytes), undo)
        except TierUnavailable as error:
            self.breaker.failed(str(error))
            raise
        except BlendError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the library raises is this tier's fault
            self.breaker.failed(str(error))
            raise TierUnavailable(f"{self.name}: {doing}: {type(error).__name__}: {error}") from None
        if value not in (RPC, TIMEOUT):
            self.breaker.succeeded()
        return value

    def _seconds(self, nbytes: int) -> float:
        return self._config.deadline_seconds + nbytes * _SECONDS_PER_BYTE

    def _fault(self, code: int, doing: str, name: str | None = None) -> StoreError | ResourceExhausted:
        """Return what a code means as an error; remember what it says about the store and about the object."""
        text = f"{self.name}: {doing}: {code} ({_MEANING.get(code, 'an error of the library')})"
        if code in (RPC, TIMEOUT, TRANSFER):
            self.breaker.failed(text)
        else:
            self.breaker.succeeded()
        if code == TRANSFER and name is not None:
            self._remember(name)
        return ResourceExhausted(text) if code == NO_SPACE else TierUnavailable(text)

    def _registered(self, view: memoryview) -> int:
        """Return a view's address. TCP would take any memory and RDMA would not, so it is checked for both."""
        address = address_of(view)
        if not self.link.covers(view):
            raise InvalidInput("buffer", f"{len(view)} bytes at {address:#x}", "memory registered with the tier")
        return address

    def _remember(self, name: str) -> None:
        with self._lock:
            if len(self._negative) >= _MAX_NEGATIVE:
                now = monotonic()
                self._negative = {key: end for key, end in self._negative.items() if end > now}
            if len(self._negative) < _MAX_NEGATIVE:
                self._negative[name] = monotonic() + self._config.negative_seconds

    def _is_negative(self, name: str) -> bool:
        with self._lock:
            end = self._negative.get(name)
            if end is None:
                return False
            if end > monotonic():
                return True
            del self._negative[name]
            return False


def _read_ranges(client: Any, reads: Sequence[_Read]) -> None:
    """Make one call for all ranges and note each one's code: its length when all of its object's arrived."""
    by_name: dict[str, list[_Read]] = {}
    for read in reads:
        by_name.setdefault(read.name, []).append(read)
    if not by_name:
        return
    codes = client.batch_get_into_multi_buffer_ranges(
        list(by_name),
        [[address_of(read.into) for read in group] for group in by_name.values()],
        [[len(read.into) for read in group] for group in by_name.values()],
        [[read.offset for read in group] for group in by_name.values()],
    )
    for group, code in zip(by_name.values(), codes, strict=True):
        whole = code == sum(len(read.into) for read in group)
        for read in group:
            read.code = len(read.into) if whole else min(int(code), 0)

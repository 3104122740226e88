"""The tier over a Mooncake store. Its bytes are untrusted, and its codes are hints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

from blend.config import MooncakeConfig
from blend.errors import Closed, InvalidInput, ObjectCorrupt, StoreError, TierUnavailable
from blend.store import health
from blend.store.base import Lease, Tier, TierStats, Writer, check_nbytes
from blend.store.buffers import Buffer, flat
from blend.store.key import PLAIN, ObjectKey, check_content
from blend.store.known import KnownVariants
from blend.store.layout import Header, encode
from blend.store.lease import Readers
from blend.store.ledger import Ledger
from blend.store.mooncake_client import MooncakeClient
from blend.store.mooncake_object import MooncakeLease, RemoteObject, read_header
from blend.store.mooncake_writer import MooncakeWriter
from blend.store.residency import ResidencyObserver
from blend.store.terms import DEFAULT_TERMS, Terms

_log = logging.getLogger(__name__)


def listing(config: MooncakeConfig) -> list[ObjectKey]:
    """Return the keys of all objects under the prefix of ``config``, without joining the store.

    Raises:
        TierUnavailable: the master's admin page cannot be read.
    """
    found, begin = [], f"{config.prefix}:"
    for name in health.list_keys(config.health_address, config.deadline_seconds * 5):
        try:
            if name.startswith(begin):
                found.append(ObjectKey.parse(name[len(begin) :]))
        except InvalidInput:
            _log.debug("%s: not an object of this store", name)
    return found


@dataclass(frozen=True)
class MooncakeStatus:
    """Whether the store can be used, and what its tier has under way.

    ``reason`` says why it is down; it is empty when it is up. ``opened`` counts how often the circuit breaker has
    opened, ``late_calls`` calls that nobody waited for any more.
    """

    up: bool
    reason: str
    opened: int
    late_calls: int
    staging_used_bytes: int
    staging_capacity_bytes: int


class _Own:
    """An object that this process has put: evicted by it alone, and not while it is read here."""

    def __init__(self, tier: MooncakeTier, key: ObjectKey, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.opened: ref[RemoteObject] | None = None
        self.readers = Readers()
        self._tier = tier

    @property
    def pinned(self) -> bool:
        self.readers.lapse()
        return self.key in self._tier._busy or (self.opened is not None and self.opened() is not None)


class MooncakeTier(Tier):
    """Objects in a Mooncake store, shared with every process that has the same master and prefix.

    It joins in the background: without a master it starts as down, and says so by :meth:`status` and by raising
    :class:`TierUnavailable` at once. ``get`` and ``contains`` find objects of all processes; the budget, ``keys`` and
    the counts of objects are about those that this process has put. What Mooncake evicts by itself is a miss when it is
    asked for. Views that leases hand out lie in staging memory, which is bounded: use them and let them go.

    Args:
        config: where the master is, and how to take part.
        make: returns a new, unjoined client of the library.
        name: what reports call it.
        observer: told what this process stores and removes.
        terms: lease time, and watermarks of what this process has put.

    Raises:
        TierUnavailable: the system has no memory for staging.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        make: Callable[[], Any],
        name: str = "mooncake",
        observer: ResidencyObserver | None = None,
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        self.name = name
        self.config = config
        self._terms = terms
        self._observer = observer
        self._ledger: Ledger[_Own] = Ledger(name, config.capacity_bytes, terms)
        self._changed = threading.Condition(threading.Lock())
        # Keys that one thread is opening, putting or removing: nobody else may do so meanwhile.
        self._busy: set[ObjectKey] = set()
        self._opened: WeakValueDictionary[ObjectKey, RemoteObject] = WeakValueDictionary()
        self._known = KnownVariants()
        self._hits = self._misses = self._failures = 0
        self._closed = False
        self._client = MooncakeClient(config, make, name)

    def put(self, header: Header, payload: Buffer) -> bool:
        view, head = header.check_payload(payload), encode(header)
        with self._changed:
            self._require_open()
            if header.key in self._ledger:
                return False
        with self.start(header.key, header.object_nbytes) as writer:
            writer.write(0, head)
            writer.write(len(head), view.toreadonly())  # nobody changes it before this returns
            return writer.commit()

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        check_nbytes(nbytes)
        with self._changed:
            self._require_open()
        self._client.require_fits(nbytes)
        self._client.breaker.peek()
        self._make_room(key, nbytes)
        return MooncakeWriter(self._client, key, nbytes, self._publish, partial(self._cancel, key))

    def get(self, key: ObjectKey) -> Lease | None:
        with self._exclusive(key):
            remote = self._opened.get(key)
            if remote is None:
                with self._counting_faults():
                    remote = self._open(key)
            with self._changed:
                if remote is None:
                    self._misses += 1
                    return None
                self._hits += 1
                self._known.learn(key)
                own = self._ledger.use(key)
                lease = MooncakeLease(remote, self.name, self._terms, self._used)
                if own is not None:
                    own.opened = ref(remote)
                    own.readers.add(lease)
            return lease

    def contains(self, key: ObjectKey) -> bool:
        """Return whether the store seems to have the object; False while it is down."""
        with self._changed:
            self._require_open()
            own = self._ledger.find(key)
        try:
            found = self._client.exists(self._name_of(key))
        except TierUnavailable as error:
            _log.debug("%s: taken as missing: %s", key, error)
            return False
        with self._changed:
            if found:
                self._known.learn(key)
            elif self._ledger.find(key) is own:  # it has not been put meanwhile
                self._drop(key)
        return found

    def variants(self, content: str) -> tuple[str, ...]:
        """Return the variants that this process has seen, and the plain one if it is there."""
        known = self.recall(content)
        if PLAIN not in known and self.contains(ObjectKey(content, PLAIN)):
            return tuple(sorted((*known, PLAIN)))
        return known

    def recall(self, content: str) -> tuple[str, ...]:
        """Return the variants that this process has seen, sorted, without asking the store."""
        check_content("content", content)
        with self._changed:
            self._require_open()
            return self._known.variants(content)

    def remove(self, key: ObjectKey) -> bool:
        with self._exclusive(key), self._counting_faults():
            remote = self._opened.get(key)
            if remote is not None:
                try:
                    remote.keep()
                except ObjectCorrupt as error:
                    _log.warning("%s: %s is removed under a lease that cannot read it any more", self.name, error)
            there = self._client.remove([self._name_of(key)])[0]
            self._forget(key, gone=there)
            return there

    def pin(self, key: ObjectKey, seconds: float | None = None) -> bool:
        """Protect an object that this process has put from being evicted by it; Mooncake evicts by its own rules."""
        with self._changed:
            self._require_open()
            here = key in self._ledger
            if here:
                self._ledger.pins.pin(key, seconds)
            return here

    def unpin(self, key: ObjectKey) -> bool:
        with self._changed:
            self._require_open()
            return self._ledger.pins.unpin(key)

    def keys(self) -> Iterator[ObjectKey]:
        """Iterate over what this process has put; :func:`blend.store.mooncake.listing` asks the master for all."""
        with self._changed:
            self._require_open()
            return iter(self._ledger.keys())

    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        """Iterate over everything that the master lists under the prefix; what others have put counts 0 bytes.

        Raises:
            TierUnavailable: the master's admin page cannot be read.
        """
        with self._changed:
            self._require_open()
        listed = listing(self.config)
        with self._changed:
            own = {held.key: held.nbytes for held in self._ledger.objects()}
        return iter([(key, own.get(key, 0)) for key in listed])

    def learn(self, key: ObjectKey) -> None:
        """Take note that another node has stored an object; its conditioned variants are found by that alone."""
        with self._changed:
            self._known.learn(key)

    def unlearn(self, key: ObjectKey) -> None:
        """Take note that another node has removed an object."""
        with self._changed:
            self._known.forget(key)

    def register(self, memory: Buffer) -> None:
        """Register memory with the library: objects go to and from it without a copy. It is kept until then.

        It is sent from where :meth:`put` is given a payload in it, and writers read-only views of it, such as a
        lease's; leases read into it. A read that failed may go on writing to its part: that must not be used again
        while a view of it lives. The host tier's memory keeps to this.

        Where the store is not joined yet, it is registered when that happens. What is refused then is copied.

        Raises:
            TierUnavailable: the library refuses it.
        """
        self._client.link.register(flat("memory", memory))

    def unregister(self, memory: Buffer) -> None:
        """Take a registration back.

        Raises:
            InvalidInput: this memory has not been registered.
        """
        self._client.link.unregister(flat("memory", memory))

    def status(self) -> MooncakeStatus:
        """Return whether the store can be used, and what is under way."""
        client = self._client
        reason = client.breaker.reason
        return MooncakeStatus(
            up=not reason,
            reason=reason,
            opened=client.breaker.opened,
            late_calls=client.late_calls,
            staging_used_bytes=client.staging.used,
            staging_capacity_bytes=client.staging.capacity,
        )

    def stats(self) -> TierStats:
        """Return the tier's state and counts, of what this process has put; while it is down, why."""
        with self._changed:
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
                down=self._client.breaker.reason,
                opened=self._client.breaker.opened,
            )

    def check_integrity(self) -> None:
        """Raise :class:`StoreError` unless ledger and staging add up. The store itself checks what it holds."""
        with self._changed:
            self._require_open()
            self._ledger.check()
        self._client.staging.check()

    def close(self) -> None:
        """Leave the store; at once when nothing is read any more, else when the last lease ends."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._ledger.clear()
        self._client.close()

    def _used(self, key: ObjectKey) -> None:
        with self._changed:
            self._ledger.use(key)

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the tier has been closed")

    def _name_of(self, key: ObjectKey) -> str:
        return f"{self.config.prefix}:{key}"

    @contextmanager
    def _exclusive(self, key: ObjectKey) -> Iterator[None]:
        """Keep other threads from opening, putting or removing an object. Calls have deadlines, so waits end."""
        with self._changed:
            self._require_open()
            while key in self._busy:
                self._changed.wait()
            self._busy.add(key)
        try:
            yield
        finally:
            self._idle([key])

    def _idle(self, keys: Sequence[ObjectKey]) -> None:
        with self._changed:
            self._busy.difference_update(keys)
            self._changed.notify_all()

    @contextmanager
    def _counting_faults(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            with self._changed:
                self._failures += 1
            raise

    def _open(self, key: ObjectKey) -> RemoteObject | None:
        """Open an object and verify its header; what is no object of that key is removed."""
        name = self._name_of(key)
        self._client.link.retain()
        try:
            if not self._client.open(name):
                self._client.link.release("")
                self._forget(key)
                return None
            header = read_header(self._client, name, key)
        except BaseException as error:
            self._client.link.release(name)
            if not isinstance(error, ObjectCorrupt):
                raise
            self._client.remove([name])
            self._forget(key)
            raise ObjectCorrupt(f"{self.name}: {key}: {error}") from error
        remote = RemoteObject(self._client, name, header, self._read_failed)
        self._opened[key] = remote
        return remote

    def _read_failed(self, remote: RemoteObject, error: StoreError) -> None:
        """Count a fault. A corrupt object is removed, if it is still the one whose header says so."""
        with self._changed:
            self._failures += 1
            closed = self._closed
        _log.warning("%s: %s", self.name, error)
        key = remote.header.key
        if closed or not isinstance(error, ObjectCorrupt):
            return
        try:
            with self._exclusive(key):
                if self._opened.get(key) is remote:
                    del self._opened[key]
                if self._client.open(remote.name) and read_header(self._client, remote.name, key) == remote.header:
                    self._client.remove([remote.name])
                    self._forget(key)
        except (StoreError, Closed) as failure:
            _log.warning("%s: %s stays, since it cannot be removed: %s", self.name, key, failure)

    def _forget(self, key: ObjectKey, gone: bool = False) -> None:
        """Take note that an object is not there; ``gone`` if it was, until this process removed it."""
        with self._changed:
            self._drop(key, gone)

    def _drop(self, key: ObjectKey, gone: bool = False) -> None:
        self._known.forget(key)
        self._opened.pop(key, None)
        own = self._ledger.find(key)
        if own is not None:
            self._ledger.remove(own)
        if self._observer is not None and (own is not None or gone):
            self._observer.on_removed(key, self.name)

    def _make_room(self, key: ObjectKey, nbytes: int) -> None:
        """Reserve ``nbytes`` for ``key``; remove what has to go for it."""
        with self._changed:
            self._require_open()
            victims = self._ledger.reserve(key, nbytes)
            self._busy.update(own.key for own in victims)
        if not victims:
            return
        try:
            self._client.remove([self._name_of(own.key) for own in victims])
        except BaseException as error:
            with self._changed:
                self._ledger.cancel(key, nbytes)
                for own in victims:
                    self._ledger.undo_eviction(own)
                self._failures += isinstance(error, StoreError)
            raise
        else:
            for own in victims:
                self._forget(own.key, gone=True)
        finally:
            self._idle([own.key for own in victims])

    def _cancel(self, key: ObjectKey, nbytes: int) -> None:
        with self._changed:
            self._ledger.cancel(key, nbytes)

    def _publish(self, key: ObjectKey, parts: Sequence[memoryview]) -> bool:
        """Put a whole object, unless one of that key is there."""
        nbytes = sum(len(part) for part in parts)
        with self._exclusive(key), self._counting_faults():
            if key in self._ledger:
                return False
            stored = self._client.put(self._name_of(key), parts)
            with self._changed:
                self._known.learn(key)
                if stored:
                    self._opened.pop(key, None)  # of that key, but lost by the store since
                    self._ledger.settle(_Own(self, key, nbytes))
                    if self._observer is not None:
                        self._observer.on_stored(key, self.name, nbytes)
        return stored

"""Copying objects between tiers, up when they are read and down when they are written, unless they are removed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from blend.errors import Closed, ResourceExhausted, StoreError
from blend.store.base import Lease, Tier, Writer
from blend.store.key import ObjectKey
from blend.store.layout import Header, encode

_log = logging.getLogger(__name__)


class Gate:
    """Through it, copies of one object are committed, until it is shut.

    It has to be opened before the object is looked up: whoever removes the object after that shuts it.
    """

    def __init__(self, key: ObjectKey) -> None:
        self.key = key
        self.shut = False
        # Held while an object is committed, so that shutting comes before that or after it.
        self._lock = threading.Lock()

    def commit(self, writer: Writer) -> bool:
        """Commit, unless the gate is shut; return whether it was open."""
        with self._lock:
            if not self.shut:
                writer.commit()
                return True
            return False

    def close(self) -> None:
        """Let nothing through from now on; safe to call again."""
        with self._lock:
            self.shut = True


class Gates:
    """The copies that are under way. Removing an object shuts its gates, and keeps others from opening."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A gate goes with the copy that holds it: a dropped lease leaves nothing behind.
        self._open: WeakSet[Gate] = WeakSet()
        self._removing: Counter[ObjectKey] = Counter()
        self._dropping: Counter[str] = Counter()

    def open(self, key: ObjectKey) -> Gate:
        """Return a gate for a copy of ``key``; shut from the start while the object is being removed."""
        gate = Gate(key)
        with self._lock:
            if key in self._removing or any(key.within(tag) for tag in self._dropping):
                gate.shut = True
            else:
                self._open.add(gate)
        return gate

    @contextmanager
    def removing(self, key: ObjectKey) -> Iterator[None]:
        """While it lasts, no copy of ``key`` is made that was not committed before."""
        with self._lock:
            self._removing[key] += 1
            gates = [gate for gate in self._open if gate.key == key]
        try:
            for gate in gates:
                gate.close()
            yield
        finally:
            with self._lock:
                self._removing[key] -= 1
                if not self._removing[key]:
                    del self._removing[key]

    @contextmanager
    def dropping(self, tag: str) -> Iterator[None]:
        """While it lasts, no copy of an object of a tenant or namespace is made; none that is under way will be."""
        with self._lock:
            self._dropping[tag] += 1
            gates = [gate for gate in self._open if gate.key.within(tag)]
        try:
            for gate in gates:
                gate.close()
            yield
        finally:
            with self._lock:
                self._dropping[tag] -= 1
                if not self._dropping[tag]:
                    del self._dropping[tag]


def copy_object(lease: Lease, target: Tier, gate: Gate) -> bool:
    """Copy a leased object to ``target``; return whether it has it then (not if ``gate`` was shut meanwhile).

    Raises:
        StoreError, ResourceExhausted, Closed: it cannot be read or written.
    """
    header = lease.header
    if target.contains(header.key):
        return True
    with target.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        writer.write(header.header_nbytes, lease.payload())
        return gate.commit(writer)


class Promotion:
    """One object on its way to a faster tier, by the lease that reads it.

    It never fails its reader: no room is fine, a fault is told to ``on_fault`` (name of the tier, error). Once its
    gate is shut it stores nothing any more.
    """

    def __init__(self, target: Tier, gate: Gate, on_fault: Callable[[str, Exception], None]) -> None:
        self.gate = gate
        self._target = target
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._layers: dict[int, memoryview] = {}

    def read_through(self, lease: Lease) -> Lease | None:
        """Read all layers straight into the faster tier; return a lease there, or ``None`` if it does not take them.

        Raises:
            StoreError: ``lease`` cannot be read.
        """
        header, failed = lease.header, False

        def source(into: memoryview) -> None:
            nonlocal failed
            failed = True
            lease.payload(into)
            failed = False

        if self.gate.shut:
            return None
        try:
            with self._target.start(header.key, header.object_nbytes) as writer:
                writer.write(0, encode(header))
                writer.fill(header.header_nbytes, header.payload_nbytes, source)
                self._commit(writer)
            return self._target.get(header.key)
        except (ResourceExhausted, Closed) as error:
            _log.debug("%s is not promoted: %s", header.key, str(error))
        except StoreError as error:
            if failed:
                raise
            self._on_fault(self._target.name, error)
        return None

    def offer(self, header: Header, first: int, view: memoryview) -> None:
        """Take verified layers that were read, from ``first`` on; with the last one missing, store the object."""
        with self._lock:
            if self.gate.shut:
                self._layers.clear()
                return
            self._layers.update(header.pieces(view, first, 0))
            if len(self._layers) < header.layers:
                return
            layers, self._layers = self._layers, {}
        try:
            with self._target.start(header.key, header.object_nbytes) as writer:
                writer.write(0, encode(header))
                for number, part in layers.items():
                    writer.write(header.layer_range(number)[0], part)
                self._commit(writer)
        except (ResourceExhausted, Closed) as error:
            _log.debug("%s is not promoted: %s", header.key, str(error))
        except StoreError as error:
            self._on_fault(self._target.name, error)

    def cancel(self) -> None:
        """Store nothing from now on; safe to call again."""
        self.gate.close()
        with self._lock:
            self._layers.clear()

    def _commit(self, writer: Writer) -> None:
        try:
            self.gate.commit(writer)
        finally:
            self.cancel()

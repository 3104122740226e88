"""One object in a Mooncake store while leases of this process read it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

from blend.errors import ObjectCorrupt, StoreError
from blend.store.base import destination
from blend.store.buffers import allocate
from blend.store.key import ObjectKey
from blend.store.layout import ALIGNMENT, Header, check_identity, decode, peek
from blend.store.lease import TimedLease
from blend.store.mooncake_client import MooncakeClient
from blend.store.terms import Terms

_PIECE_NBYTES = 4 << 20
OnFault = Callable[["RemoteObject", StoreError], None]


def read_header(client: MooncakeClient, name: str, key: ObjectKey) -> Header:
    """Return the verified header of an opened object.

    Raises:
        ObjectCorrupt: it is none, or another object's.
        TierUnavailable: it cannot be read.
    """
    raw = client.room(ALIGNMENT)
    client.read(name, 0, raw)
    nbytes = peek(raw)
    if nbytes > len(raw):
        raw = client.room(nbytes)
        client.read(name, 0, raw)
    header = decode(raw)
    check_identity(header, key, header.object_nbytes)
    return header


class RemoteObject:
    """An opened object and its header. It is open while anything refers to it, leases above all.

    Removing an object from the store takes its memory at once, so before that :meth:`keep` copies it here for the
    leases that are left. Whatever happens to it elsewhere shows in a checksum.

    Args:
        client: the store; already retained, and released when this object is garbage.
        name: the object's name in the store.
        header: its header.
        on_fault: told of a fault in reading.
    """

    def __init__(self, client: MooncakeClient, name: str, header: Header, on_fault: OnFault) -> None:
        self.name = name
        self.header = header
        self._client = client
        self._on_fault = on_fault
        self._kept: memoryview | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, client.link.release, name).atexit = False

    def layer(self, layer: int, into: memoryview | None) -> memoryview:
        """Return a layer, verified; see :meth:`Lease.layer`."""
        offset, nbytes = self.header.layer_range(layer)
        return self._read(offset, nbytes, layer, 1, into)

    def payload(self, into: memoryview | None) -> memoryview:
        """Return all layers, verified; see :meth:`Lease.payload`."""
        header = self.header
        return self._read(header.header_nbytes, header.payload_nbytes, 0, header.layers, into)

    def keep(self) -> None:
        """Read all of it into memory of its own, from where it is read from now on.

        Raises:
            StoreError: it cannot be read.
        """
        with self._lock:
            if self._kept is None:
                room = allocate(self.header.payload_nbytes).data
                self._through_staging(self.header.header_nbytes, 0, self.header.layers, room)
                self._kept = room.toreadonly()

    def _read(self, offset: int, nbytes: int, layer: int, layers: int, into: memoryview | None) -> memoryview:
        target = destination(into, nbytes) if into is not None else None
        failure: StoreError | None = None
        try:
            if self._kept is None:
                return self._fetch(offset, nbytes, layer, layers, target)
        except StoreError as error:
            # A new one, without the frames of the read: whoever keeps it, a log say, would keep their staging memory.
            failure = type(error)(str(error))
        if self._kept is None:  # else it was removed meanwhile, and is here
            assert failure is not None
            self._on_fault(self, failure)
            raise failure
        start = offset - self.header.header_nbytes
        view = self._kept[start : start + nbytes]
        if target is None:
            return view
        target[:] = view
        return target.toreadonly()

    def _fetch(self, offset: int, nbytes: int, layer: int, layers: int, target: memoryview | None) -> memoryview:
        """Read layers from the store into ``target``, or into memory of its own, and return a view of that.

        What has been registered is read into straight away. Other memory is never handed to the library, which may go
        on writing to it after a deadline.
        """
        if target is None:
            fits = nbytes <= self._client.staging.capacity
            target = self._client.room(nbytes) if fits else allocate(nbytes).data
        if not self._client.covers(target):
            self._through_staging(offset, layer, layers, target)
            return target.toreadonly()
        for first, count in self._pieces(layers):
            self._transfer(offset, layer + first, target[first * self._step : (first + count) * self._step], first)
        return target.toreadonly()

    def _through_staging(self, offset: int, layer: int, layers: int, target: memoryview) -> None:
        for first, count in self._pieces(layers):
            room = self._client.room(count * self._step)
            self._transfer(offset, layer + first, room, first)
            target[first * self._step : (first + count) * self._step] = room
            del room  # before the next piece asks for its own

    def _transfer(self, offset: int, layer: int, into: memoryview, skipped: int) -> None:
        self._client.read(self.name, offset + skipped * self._step, into)
        for number in range(len(into) // self._step):
            try:
                self.header.verify_layer(layer + number, into[number * self._step : (number + 1) * self._step])
            except ObjectCorrupt as error:
                raise ObjectCorrupt(f"{self._client.name}: {self.header.key}: {error}") from error

    @property
    def _step(self) -> int:
        return self.header.layer_nbytes

    def _pieces(self, layers: int) -> Iterator[tuple[int, int]]:
        """Whole layers, of about as many bytes as one transfer should have: ``(first, count)``."""
        count = max(min(_PIECE_NBYTES, self._client.staging.capacity) // self._step, 1)
        for first in range(0, layers, count):
            yield first, min(count, layers - first)


class MooncakeLease(TimedLease):
    """A lease on an object in a Mooncake store. ``on_use`` is told of its key whenever it is renewed."""

    def __init__(self, remote: RemoteObject, tier: str, terms: Terms, on_use: Callable[[ObjectKey], object]) -> None:
        super().__init__(remote.header, tier, terms)
        self._remote: RemoteObject | None = remote
        self._on_use = on_use

    def layer(self, layer: int, into: memoryview | None = None) -> memoryview:
        return self._held().layer(layer, into)

    def payload(self, into: memoryview | None = None) -> memoryview:
        return self._held().payload(into)

    def _let_go(self) -> None:
        self._remote = None

    def _used(self) -> None:
        self._on_use(self.header.key)

    def _held(self) -> RemoteObject:
        self._require_held()
        remote = self._remote
        if remote is None:
            raise self._released()
        return remote

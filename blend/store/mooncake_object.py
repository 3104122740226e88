"""One object in a Mooncake store while leases of this process read it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

from blend.errors import ObjectCorrupt, StoreError
from blend.store.base import destination, given
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

    def keep(self) -> None:
        """Read all of it into memory of its own, from where it is read from now on.

        Raises:
            StoreError: it cannot be read.
        """
        with self._lock:
            if self._kept is None:
                room = allocate(self.header.payload_nbytes).data
                self._through_staging(0, room)
                self._kept = room.toreadonly()

    def layers(self, first: int, count: int, into: memoryview | None) -> memoryview:
        """Return some layers, verified; see :meth:`Lease.layers`."""
        offset, nbytes = self.header.layer_range(first, count)
        target = destination(into, nbytes) if into is not None else None
        failure: StoreError | None = None
        try:
            if self._kept is None:
                return self._fetch(first, nbytes, target)
        except StoreError as error:
            # A new one, without the frames of the read: whoever keeps it, a log say, would keep their staging memory.
            failure = type(error)(str(error))
        if self._kept is None:  # else it was removed meanwhile, and is here
            assert failure is not None
            self._on_fault(self, failure)
            raise failure
        start = offset - self.header.header_nbytes
        return given(self._kept[start : start + nbytes], target)

    def _fetch(self, layer: int, nbytes: int, target: memoryview | None) -> memoryview:
        """Read layers from the store into ``target``, or into memory of its own, and return a view of that.

        What has been registered is read into straight away. Other memory is never handed to the library, which may go
        on writing to it after a deadline.
        """
        if target is None:
            fits = nbytes <= self._client.staging.capacity
            target = self._client.room(nbytes) if fits else allocate(nbytes).data
        if not self._client.covers(target):
            self._through_staging(layer, target)
            return target.toreadonly()
        for first, piece in self._pieces(layer, target):
            self._transfer(first, piece)
        return target.toreadonly()

    def _through_staging(self, layer: int, target: memoryview) -> None:
        for first, piece in self._pieces(layer, target):
            room = self._client.room(len(piece))
            self._transfer(first, room)
            piece[:] = room
            del room  # before the next piece asks for its own

    def _transfer(self, layer: int, into: memoryview) -> None:
        self._client.read(self.name, self.header.layer_range(layer)[0], into)
        try:
            self.header.verify(into, layer)
        except ObjectCorrupt as error:
            raise ObjectCorrupt(f"{self._client.name}: {self.header.key}: {error}") from error

    def _pieces(self, layer: int, target: memoryview) -> Iterator[tuple[int, memoryview]]:
        return self.header.pieces(target, layer, min(_PIECE_NBYTES, self._client.staging.capacity))


class MooncakeLease(TimedLease):
    """A lease on an object in a Mooncake store. ``on_use`` is told of its key whenever it is renewed."""

    def __init__(self, remote: RemoteObject, tier: str, terms: Terms, on_use: Callable[[ObjectKey], object]) -> None:
        super().__init__(remote.header, tier, terms)
        self._remote: RemoteObject | None = remote
        self._on_use = on_use

    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        return self._held().layers(first, count, into)

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

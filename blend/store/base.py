"""The contract of a storage tier. Everything that stores objects, the tier of tiers included, is a :class:`Tier`.

Life of an object: put-start, ranged writes, then commit or revoke. It is readable only after commit, never changes
afterwards, and its bytes stay where they are for as long as a lease, or a view that a lease gave out, can reach them.
No tier ever hands out a byte that has not passed its checksum: it is verified when it enters memory or whenever it is
read from elsewhere.

Every method may be called from any thread. Leases too; a writer belongs to one thread at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from blend.errors import Closed, InvalidInput, LeaseReleased, ObjectCorrupt
from blend.store.buffers import Buffer, Coverage, allocate, flat
from blend.store.key import ObjectKey
from blend.store.layout import Header, encode
from blend.store.tenants import TenantUsage

_Writer = TypeVar("_Writer", bound="Writer")
_Lease = TypeVar("_Lease", bound="Lease")
_Tier = TypeVar("_Tier", bound="Tier")


@dataclass(frozen=True)
class TierStats:
    """One tier's state and its counts since it was opened.

    ``used_bytes`` includes objects that are being written, that were removed under a lease and are still reachable,
    or that were set aside as corrupt; it never exceeds ``capacity_bytes``. ``failures`` counts faults: a ``get`` that
    was neither hit nor miss, and reads and writes that failed later. ``quarantined`` is the number of corrupt objects
    that are set aside now. ``down`` is why the tier cannot be used now, empty where it can; one that cannot tell its
    figures has zeros. ``opened`` is how often it was given up for a while.
    """

    name: str
    objects: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    failures: int
    evictions: int
    quarantined: int = 0
    down: str = ""
    opened: int = 0


class Writer(ABC):
    """An object that is being written: its space is reserved, and nobody can read it.

    A context manager: leaving it without :meth:`commit`, with an exception or not, revokes. So does any method that
    raises a :class:`StoreError`. A writer that is dropped without either keeps its reservation.
    """

    def __init__(self, key: ObjectKey, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self._written = Coverage()
        self._ended = False

    def write(self, offset: int, data: Buffer) -> None:
        """Copy ``data`` to ``offset`` bytes into the object (header first, then payload); ranges in any order.

        Raises:
            InvalidInput: the range is not inside the object.
            TierUnavailable: the tier failed; the object is revoked.
            Closed: the writer has ended, or its tier was closed.
        """
        self._require_open()
        view = flat("data", data)
        self._check_range(offset, len(view))
        try:
            self._write(offset, view)
        except BaseException:
            self.revoke()
            raise
        self._written.add(offset, offset + len(view))

    def fill(self, offset: int, nbytes: int, source: Callable[[memoryview], object]) -> None:
        """Let ``source`` write ``nbytes`` at ``offset``, straight into the object where that has memory of its own.

        ``source`` gets a writable flat view, fills all of it and must not keep it. What it raises is passed on, and
        the object is revoked; otherwise as :meth:`write`.
        """
        self._require_open()
        self._check_range(offset, nbytes)
        try:
            self._fill(offset, nbytes, source)
        except BaseException:
            self.revoke()
            raise
        self._written.add(offset, offset + nbytes)

    def peek(self, offset: int, nbytes: int) -> memoryview | None:
        """Return a read-only view of bytes that have been written, or ``None`` where the object has no memory.

        It keeps that memory as any view of a lease does, whatever becomes of the object.

        Raises:
            InvalidInput: the range is not inside the object.
            Closed: the writer has ended, or its tier was closed.
        """
        self._require_open()
        self._check_range(offset, nbytes)
        return self._peek(offset, nbytes)

    def commit(self) -> bool:
        """Make the object readable. Returns False, keeping nothing, when one of that key is there by now.

        Raises:
            ObjectCorrupt: bytes are missing, the header is not this object's, or a layer fails its checksum.
            TierUnavailable: the tier failed; the object is revoked.
            Closed: the writer has ended, or its tier was closed.
        """
        self._require_open()
        try:
            gap = self._written.first_gap(self.nbytes)
            if gap is not None:
                raise ObjectCorrupt(f"{self.key}: byte {gap} of {self.nbytes} was never written")
            stored = self._commit()
        except BaseException:
            self.revoke()
            raise
        if not stored:
            self.revoke()
        self._ended = True
        return stored

    def revoke(self) -> None:
        """Give the reserved space back. Does nothing after commit, or when called again."""
        if not self._ended:
            self._ended = True
            self._revoke()

    def __enter__(self: _Writer) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revoke()

    def _require_open(self) -> None:
        if self._ended:
            raise Closed(f"{self.key}: this writer has been committed or revoked")

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidInput("range", (offset, offset + nbytes), f"within 0 to {self.nbytes} bytes")

    def _fill(self, offset: int, nbytes: int, source: Callable[[memoryview], object]) -> None:
        view = allocate(nbytes).data
        source(view)
        self._write(offset, view)

    def _peek(self, offset: int, nbytes: int) -> memoryview | None:
        return None

    @abstractmethod
    def _write(self, offset: int, view: memoryview) -> None: ...

    @abstractmethod
    def _commit(self) -> bool: ...

    @abstractmethod
    def _revoke(self) -> None: ...


class Lease(ABC):
    """The right to read one object, which stays whole while it is held. A context manager.

    Attributes:
        header: the object's header, verified.
        tier: name of the tier that serves it.

    A view that outlives its lease goes on showing the same bytes: their memory is kept, and counted, until the last
    view of it (slices, arrays and tensors made from it included) is garbage. Tiers never take memory back from under
    a view, since some libraries keep its address beyond its release.

    Where leases have a time, one that is not renewed ends with it: the next read raises :class:`LeaseReleased`, and
    the object may be evicted. A lease that nobody uses or releases therefore holds its object for that long only.
    """

    def __init__(self, header: Header, tier: str) -> None:
        self.header = header
        self.tier = tier

    @abstractmethod
    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        """Return some layers, ``[count, 2, KVH, T, D]``, as a read-only flat view of verified bytes.

        One read where a tier can. With ``into``, a writable view of as many bytes, they are put there, and the view
        is of that.

        Raises:
            InvalidInput: there are no such layers, or ``into`` cannot take them.
            ObjectCorrupt: the bytes fail their checksum, or are missing; ``into`` may hold anything then.
            TierUnavailable: the tier failed.
            LeaseReleased: the lease has been released, or has expired.
        """

    def layer(self, layer: int, into: memoryview | None = None) -> memoryview:
        """Return one layer, ``[2, KVH, T, D]``; otherwise as :meth:`layers`."""
        return self.layers(layer, 1, into)

    def payload(self, into: memoryview | None = None) -> memoryview:
        """Return all layers, ``[L, 2, KVH, T, D]``; otherwise as :meth:`layers`."""
        return self.layers(0, self.header.layers, into)

    def expect(self, first: int, count: int) -> None:  # noqa: B027 - what is as fast as it gets prepares nothing
        """Take a hint that these layers will be read soon. Costs next to nothing, and never fails."""

    @abstractmethod
    def release(self) -> None:
        """End the lease; safe to call again. Afterwards reading from it raises."""

    def renew(self) -> None:  # noqa: B027 - leases without a time have none to begin anew
        """Begin the lease's time anew, where leases have one. It counts as a use, for eviction.

        Raises:
            LeaseReleased: the lease has ended.
        """

    @property
    def seconds_left(self) -> float:
        """How long the lease is still good without being renewed; ``inf`` where leases do not expire."""
        return math.inf

    def __enter__(self: _Lease) -> _Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _released(self) -> LeaseReleased:
        return LeaseReleased(f"{self.header.key}: the lease on it has been released")


class Tier(ABC):
    """A place for objects, with a budget in bytes that is never exceeded. A context manager that closes itself.

    Attributes:
        name: what reports and statistics call it.
        persistent: whether objects outlive this process.
        in_memory: whether leases hand out views at once, with nothing to be read first.

    After :meth:`close` every other method raises :class:`Closed`; leases that are held stay good until released.
    """

    name: str
    persistent: bool = True
    in_memory: bool = False

    def put(self, header: Header, payload: Buffer) -> bool:
        """Store a copy of ``payload``, ``[L, 2, KVH, T, D]`` as bytes, under ``header.key``.

        Returns False when an object of that key is already there: the first one stays.

        Raises:
            InvalidInput: the payload's length is not the header's, or the header has no checksums.
            ObjectCorrupt: a checksum does not fit (tiers that verify what enters).
            ResourceExhausted: the object is larger than the tier or its tenant's quota, or leases, pins and writers
                hold all other space.
            TierUnavailable: the tier failed; nothing is left of the object.
        """
        view, head = header.check_payload(payload), encode(header)
        if self.contains(header.key):
            return False
        with self.start(header.key, header.object_nbytes) as writer:
            writer.write(0, head)
            writer.write(len(head), view)
            return writer.commit()

    @abstractmethod
    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        """Reserve space for an object of ``nbytes``, header included, evicting what is unleased and least recently
        used; return its writer.

        Several writers of one key may be at work; the first to commit stays.

        Raises:
            InvalidInput: ``nbytes`` is not a positive integer.
            ResourceExhausted: the object is larger than the tier or its tenant's quota, or leases, pins and writers
                hold all other space.
            TierUnavailable: the tier failed.
        """

    def expect(self, keys: Iterable[ObjectKey]) -> None:  # noqa: B027 - see Lease.expect
        """Take a hint that these objects, if they are here, will be asked for soon. Costs little, and never fails."""

    @abstractmethod
    def get(self, key: ObjectKey) -> Lease | None:
        """Return a lease on the object, or ``None`` when it is not here. Its header has been verified.

        Raises:
            TierUnavailable: the tier failed; the object may be here.
            ObjectCorrupt: it was here, but its header or size fails a check.
        """

    @abstractmethod
    def contains(self, key: ObjectKey) -> bool:
        """Return whether the object seems to be here: a hint, without a lease. Not a use, for eviction."""

    @abstractmethod
    def variants(self, content: str) -> tuple[str, ...]:
        """Return the variants of a content key that seem to be here, sorted."""

    def recall(self, content: str) -> tuple[str, ...]:
        """Return the variants that can be told without a round trip, sorted: all of them, where asking costs none."""
        return self.variants(content)

    @abstractmethod
    def remove(self, key: ObjectKey) -> bool:
        """Remove the object; return False when it is not here.

        From then on no look-up finds it, and its key may be put again. Leases that are held go on reading it; its
        space is given back when the last of them ends.

        Raises:
            TierUnavailable: the tier failed; the object is still here.
        """

    def pin(self, key: ObjectKey, seconds: float | None = None) -> bool:
        """Protect an object from eviction; return False when it is not here, or this tier cannot.

        With ``seconds`` the pin is soft: until they have passed, the object is evicted only where nothing else makes
        room. Without, it is hard: the object stays until it is removed. The last call counts. Pins are this process's
        own: what another one does with a shared directory does not know of them.

        Raises:
            InvalidInput: ``seconds`` is no positive number.
        """
        return False

    def unpin(self, key: ObjectKey) -> bool:
        """Take a pin back; return whether the object had one."""
        return False

    def keep_while(self, wanted: Callable[[ObjectKey], bool]) -> bool:
        """Never evict an object for which ``wanted`` returns True; return False if this tier cannot promise that.

        ``wanted`` is called with the tier's lock held: it must be quick and call no tier.
        """
        return False

    @abstractmethod
    def keys(self) -> Iterator[ObjectKey]:
        """Iterate over the keys that are here now, in no promised order: a snapshot."""

    @abstractmethod
    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        """Iterate over the objects that can be found here now, other processes' included, with their bytes.

        Raises:
            TierUnavailable: the tier failed.
        """

    def headers(self, keys: Iterable[ObjectKey]) -> Iterator[Header]:
        """Iterate over the verified headers of those of these objects that are here, with no payload read for it.

        Not a use, for eviction. Nothing where a header is not to be had without a look-up that counts; what is corrupt
        is left out.

        Raises:
            TierUnavailable: the tier failed.
        """
        return iter(())

    def tenants(self) -> tuple[TenantUsage, ...]:
        """Return what every tenant holds here, and its quota; none where this tier knows of no tenants."""
        return ()

    def lingering(self, tag: str) -> int:
        """Return the bytes of a tenant's or a namespace's removed objects that leases of this process still read."""
        return 0

    @abstractmethod
    def stats(self) -> TierStats:
        """Return the tier's state and counts."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise :class:`StoreError`, with the numbers, unless counters, ledger and contents agree."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; safe to call again. Open writers cannot commit any more."""

    def __enter__(self: _Tier) -> _Tier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def given(view: memoryview, into: memoryview | None) -> memoryview:
    """Return bytes that are in memory as :meth:`Lease.layers` does: a view of them, or of their copy in ``into``."""
    if into is None:
        return view
    into = destination(into, len(view))
    into[:] = view
    return into.toreadonly()


def destination(into: memoryview, nbytes: int) -> memoryview:
    """Return ``into`` as a flat view; raise :class:`InvalidInput` unless it can take ``nbytes``."""
    view = flat("into", into)
    if view.readonly or len(view) != nbytes:
        kind = "read-only" if view.readonly else "writable"
        raise InvalidInput("into", f"{len(view)} bytes, {kind}", f"{nbytes} writable bytes")
    return view


def check_nbytes(nbytes: object) -> None:
    """Raise :class:`InvalidInput` unless ``nbytes`` can be the size of an object."""
    if type(nbytes) is not int or nbytes < 1:
        raise InvalidInput("nbytes", nbytes, "a positive integer")

"""The local-disk tier: one file an object, read with ``pread``, committed by renaming."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from blend.errors import Closed, ObjectCorrupt, StoreError, TierUnavailable
from blend.helper import Helper
from blend.store.base import Tier, TierStats, Writer, check_nbytes, destination
from blend.store.buffers import allocate
from blend.store.directory import StoreDirectory
from blend.store.diskfile import OpenFile, StoredFile, read_header, read_range
from blend.store.diskspace import DiskSpace
from blend.store.fileio import READ, FileIO, close, describe, write_all
from blend.store.key import ObjectKey, check_content
from blend.store.layout import Header
from blend.store.lease import TimedLease
from blend.store.observed import ObservedLedger
from blend.store.residency import ResidencyObserver
from blend.store.tenants import NO_QUOTAS, Quotas, TenantUsage, usage_of
from blend.store.terms import DEFAULT_TERMS, Terms

_log = logging.getLogger(__name__)
_PIECE_NBYTES = 2 << 20
"""What is read at once, and then verified while it is in a cache; a second thread takes the next one meanwhile."""
_HEAD_NBYTES = 1 << 16
"""What is read ahead of an object before its header is known: more than any header of a usual chunk."""


class DiskTier(Tier):
    """Objects in files of a directory; verified on every read; there again after a restart.

    A file appears under its object's name only when it is whole and, with ``fsync``, flushed: a process may be killed
    at any byte. Any number of processes may use one directory, and share one budget: what another one put is found,
    what it removed is a miss, and an object that is being read stays readable whoever removes it. Each evicts by its
    own order of use. They should be given the same budget, for the smallest one evicts what the others store. A forked
    child opens a tier of its own.

    Args:
        directory: where the files live; made when missing.
        capacity_bytes: budget for objects, those being written and those quarantined, headers included, of all
            processes together. Starting up over it, after it was lowered, evicts the oldest.
        fsync: whether an object is flushed to the device before it counts as stored.
        name: what reports call it.
        io: the system calls.
        terms: lease time, watermarks and clock.
        observer: told what enters and what leaves, as far as this process knows: what was there before and what other
            processes put or removed when it comes upon that. Closing the tier leaves everything where it is.
        quotas: what each tenant may hold of the budget, in all processes together; they too should be given the same.
            Starting up over one evicts the oldest of that tenant. They are noted in the directory; ``None`` enforces
            none, and leaves the note as it is.

    Raises:
        InvalidConfig: the budget is no positive integer.
        TierUnavailable: the directory cannot be used, or has a newer layout.
    """

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        fsync: bool = True,
        name: str = "disk",
        io: FileIO | None = None,
        terms: Terms = DEFAULT_TERMS,
        observer: ResidencyObserver | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.name = name
        self._io = io or FileIO()
        self._fsync = fsync
        self._terms = terms
        self._ledger: ObservedLedger[StoredFile] = ObservedLedger(
            name, capacity_bytes, terms, observer, quotas or NO_QUOTAS
        )
        self._helper = Helper(f"{name}-reader")
        self._hits = self._misses = self._failures = 0
        self._closed = False
        opened = StoreDirectory(Path(directory), self._io, fsync)
        try:
            if quotas is not None:
                opened.note_quotas(quotas)
            self._space = DiskSpace(self._ledger, opened, self._io)
        except OSError as error:
            raise TierUnavailable(f"{name}: {directory} cannot be read: {describe(error)}") from error
        self._lock = self._space.lock

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        check_nbytes(nbytes)
        self._check_open()
        try:
            fd, path = self._space.reserve(key, nbytes)
        except (OSError, TierUnavailable) as error:
            raise self._failed(f"making room for {key}", error) from error
        return _DiskWriter(self, key, nbytes, fd, path)

    def get(self, key: ObjectKey) -> DiskLease | None:
        with self._lock:
            self._require_open()
            held = self._ledger.use(key)
            file = held.file() if held is not None else None
        if file is not None and file.unlinked:
            self._space.lost(file.held)
            held = None
        elif file is not None:
            return self._lease(file)
        if held is None:
            held = self._look(key)
        file = self._share(held) if held is not None else None
        if file is not None:
            return self._lease(file)
        with self._lock:
            self._misses += 1
        return None

    def expect(self, keys: Iterable[ObjectKey]) -> None:
        """Have the system begin to read the headers, all of them at once."""
        for key in keys:
            with suppress(OSError):
                fd = self._io.open(self._space.directory.path_of(key), READ)
                try:
                    self._io.advise(fd, 0, _HEAD_NBYTES)
                finally:
                    close(self._io, fd)

    def contains(self, key: ObjectKey) -> bool:
        self._check_open()
        return self._look(key) is not None

    def variants(self, content: str) -> tuple[str, ...]:
        check_content("content", content)
        self._check_open()
        try:
            return self._space.variants(content)
        except OSError as error:
            raise self._failed(f"looking for {content}", error) from error

    def remove(self, key: ObjectKey) -> bool:
        self._check_open()
        try:
            return self._space.remove(key)
        except OSError as error:
            raise self._failed(f"removing {key}", error) from error

    def pin(self, key: ObjectKey, seconds: float | None = None) -> bool:
        self._check_open()
        held = self._look(key)
        with self._lock:
            if held is None or self._ledger.find(key) is not held:
                return False
            self._ledger.pins.pin(key, seconds)
            return True

    def unpin(self, key: ObjectKey) -> bool:
        with self._lock:
            self._require_open()
            return self._ledger.pins.unpin(key)

    def keep_while(self, wanted: Callable[[ObjectKey], bool]) -> bool:
        with self._lock:
            self._ledger.keep = wanted
        return True

    def keys(self) -> Iterator[ObjectKey]:
        self._check_open()
        try:
            return iter(self._space.keys())
        except OSError as error:
            raise self._failed("listing", error) from error

    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        self._check_open()
        try:
            return iter(self._space.sizes())
        except OSError as error:
            raise self._failed("listing", error) from error

    def headers(self, keys: Iterable[ObjectKey]) -> Iterator[Header]:
        self._check_open()
        return filter(None, map(self._header, keys))

    def _header(self, key: ObjectKey) -> Header | None:
        """Return an object's header, a read of a few kilobytes; ``None`` where it is not there, or corrupt."""
        self._check_open()
        held = self._look(key)
        try:
            file = self._open(held) if held is not None else None
        except ObjectCorrupt:
            return None
        return file.header if file is not None else None

    def tenants(self) -> tuple[TenantUsage, ...]:
        """Return what every tenant holds, in all processes together, with the quotas of this one."""
        self._check_open()
        try:
            return usage_of(self._space.shares, self._ledger.limits.quotas)
        except OSError as error:
            raise self._failed("reading the ledger", error) from error

    def lingering(self, tag: str) -> int:
        with self._lock:
            self._require_open()
            return self._ledger.lingering(tag)

    def stats(self) -> TierStats:
        """Return the tier's state and counts: the bytes of all processes, the objects that this one has seen."""
        self._check_open()
        try:
            used = self._space.used
        except OSError as error:
            raise self._failed("reading the ledger", error) from error
        with self._lock:
            return TierStats(
                name=self.name,
                objects=len(self._ledger),
                used_bytes=used,
                capacity_bytes=self._ledger.capacity,
                hits=self._hits,
                misses=self._misses,
                failures=self._failures,
                evictions=self._ledger.evictions,
                quarantined=self._space.quarantined,
            )

    def check_integrity(self) -> None:
        """Raise :class:`StoreError` unless the ledger adds up, every object's file has the size it says, and the
        directory holds no more than all processes have recorded.

        An object without a file is a miss when it is asked for. It is reported only where no other process can have
        removed it.
        """
        self._check_open()
        try:
            self._space.check()
        except OSError as error:
            raise self._failed("checking", error) from error

    def close(self) -> None:
        """Let go of everything, once a long read that is under way has ended; otherwise as for any tier."""
        with self._lock:
            self._closed = True
        self._helper.close()
        self._space.close()

    def _check_open(self) -> None:
        with self._lock:
            self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the tier has been closed")

    def _failed(self, doing: str, error: OSError | StoreError) -> TierUnavailable:
        """Count a fault and return it as the error to raise."""
        with self._lock:
            self._failures += 1
        reason = describe(error) if isinstance(error, OSError) else str(error)
        _log.warning("%s: %s: %s", self.name, doing, reason)
        return TierUnavailable(f"{self.name}: {doing}: {reason}")

    def _look(self, key: ObjectKey) -> StoredFile | None:
        try:
            return self._space.look(key)
        except OSError as error:
            raise self._failed(f"looking for {key}", error) from error

    def _lease(self, file: OpenFile) -> DiskLease:
        lease = DiskLease(self, file, self._terms)
        with self._lock:
            self._hits += 1
            file.held.readers.add(lease)
        return lease

    def _share(self, held: StoredFile) -> OpenFile | None:
        """Return the descriptor that all leases on an object share; ``None`` when another process has removed it."""
        with self._lock:
            held.opening += 1
        file: OpenFile | None = None
        try:
            file = self._open(held)
        finally:
            with self._lock:
                held.opening -= 1
                if file is not None:
                    file = held.share(file)
        return file

    def _open(self, held: StoredFile) -> OpenFile | None:
        """Open an object's file and verify its header."""
        try:
            fd = self._io.open(self._space.directory.path_of(held.key), READ)
        except FileNotFoundError:
            self._space.lost(held)
            return None
        except OSError as error:
            raise self._failed(f"opening {held.key}", error) from error
        try:
            file = OpenFile(self._io, fd, held, read_header(self._io, fd, held.key, held.nbytes))
        except BaseException as error:
            close(self._io, fd)
            if isinstance(error, (ObjectCorrupt, OSError)):
                raise self._read_error(held, error) from error
            raise
        return file

    def _read_error(self, held: StoredFile, error: ObjectCorrupt | OSError) -> StoreError:
        """Count a failed read and return the error to raise; a corrupt object's file is moved out of the way."""
        if isinstance(error, OSError):
            return self._failed(f"reading {held.key}", error)
        _log.warning("%s: %s is corrupt: %s", self.name, held.key, str(error))
        with self._lock:
            self._failures += 1
        self._space.set_aside(held)
        return ObjectCorrupt(f"{self.name}: {held.key}: {error}")


class _DiskWriter(Writer):
    def __init__(self, tier: DiskTier, key: ObjectKey, nbytes: int, fd: int, path: str) -> None:
        super().__init__(key, nbytes)
        self._tier = tier
        self._fd = fd
        self._path = path

    def _write(self, offset: int, view: memoryview) -> None:
        self._tier._check_open()
        try:
            write_all(self._tier._io, self._fd, view, offset)
        except OSError as error:
            raise self._tier._failed(f"writing {self.key}", error) from error

    def _commit(self) -> bool:
        tier = self._tier
        tier._check_open()
        try:
            read_header(tier._io, self._fd, self.key, self.nbytes)
            if tier._fsync:
                tier._io.fsync(self._fd)
            stored = tier._space.publish(self.key, self.nbytes, self._path)
        except OSError as error:
            raise tier._failed(f"committing {self.key}", error) from error
        if stored:
            close(tier._io, self._fd)
        return stored

    def _revoke(self) -> None:
        self._tier._space.cancel(self.key, self._fd, self._path, self.nbytes)
        close(self._tier._io, self._fd)


class DiskLease(TimedLease):
    """A lease on a file, which its descriptor keeps readable whoever removes it."""

    def __init__(self, tier: DiskTier, file: OpenFile, terms: Terms) -> None:
        super().__init__(file.header, tier.name, terms)
        self._tier = tier
        self._file: OpenFile | None = file

    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        offset, nbytes = self.header.layer_range(first, count)
        self._require_held()
        file = self._file
        if file is None:
            raise self._released()
        target = destination(into, nbytes) if into is not None else allocate(nbytes).data
        header, io = self.header, self._tier._io
        pieces = list(header.pieces(target, first, _PIECE_NBYTES))
        reading: AbstractContextManager[object] = threading.Lock()  # in order, so that the system reads ahead

        def read(piece: tuple[int, memoryview]) -> None:
            layer, part = piece
            with reading:
                read_range(io, file.fd, header.layer_range(layer)[0], part)
            header.verify(part, layer)

        try:
            if len(pieces) > 1 and io.cached(file.fd, offset + nbytes - 1):
                reading = nullcontext()  # with its last byte in memory, the rest is likely there
            self._tier._helper.each(read, pieces)
        except (ObjectCorrupt, OSError) as error:
            raise self._tier._read_error(file.held, error) from error
        return target.toreadonly()

    def expect(self, first: int, count: int) -> None:
        file = self._file
        if file is not None:
            with suppress(OSError):
                self._tier._io.advise(file.fd, *self.header.layer_range(first, count))

    def _let_go(self) -> None:
        self._file = None

    def _used(self) -> None:
        with self._tier._lock:
            self._tier._ledger.use(self.header.key)

"""The local-disk tier: one file an object, read with ``pread``, committed by renaming."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from blend.errors import Closed, ObjectCorrupt, ResourceExhausted, StoreError, TierUnavailable
from blend.store.base import Lease, Tier, TierStats, Writer, check_nbytes, destination
from blend.store.buffers import allocate
from blend.store.directory import StoreDirectory
from blend.store.diskfile import OpenFile, StoredFile, read_header, read_range
from blend.store.fileio import READ, FileIO, close, describe, write_all
from blend.store.key import ObjectKey, check_content
from blend.store.ledger import Ledger

_log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Objects in files of a directory; verified on every read; there again after a restart.

    A file appears under its object's name only when it is whole and, with ``fsync``, flushed: a process may be killed
    at any byte. Several processes may use one directory, each with its own budget: what another one removed is a
    miss, and what it replaced is the same object again.

    Args:
        directory: where the files live; made when missing.
        capacity_bytes: budget for objects, those being written and those quarantined, headers included. Starting up
            over it, after it was lowered, evicts the oldest.
        fsync: whether an object is flushed to the device before it counts as stored.
        name: what reports call it.
        io: the system calls.

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
    ) -> None:
        self.name = name
        self._io = io or FileIO()
        self._fsync = fsync
        self._ledger: Ledger[StoredFile] = Ledger(name, capacity_bytes)
        self._changed = threading.Condition(threading.Lock())
        # Keys whose file is being renamed or unlinked: in no ledger, and nobody else may touch their file.
        self._moving: set[ObjectKey] = set()
        self._quarantine: list[StoredFile] = []
        self._hits = self._misses = self._failures = 0
        self._closed = False
        self._directory = StoreDirectory(Path(directory), self._io, fsync)
        try:
            for _, path, key, nbytes in self._directory.scan_quarantine():
                self._quarantine.append(StoredFile(key, nbytes, path))
                self._ledger.count_aside(nbytes)
            for _, key, nbytes in self._directory.scan():
                self._ledger.adopt(StoredFile(key, nbytes))
            self._make_room(0)
        except OSError as error:
            raise TierUnavailable(f"{name}: {directory} cannot be read: {describe(error)}") from error

    def start(self, key: ObjectKey, nbytes: int) -> Writer:
        check_nbytes(nbytes)
        self._make_room(nbytes)
        try:
            fd, path = self._directory.create_temporary(key)
        except (OSError, TierUnavailable) as error:
            with self._changed:
                self._ledger.cancel(nbytes)
            raise self._failed(f"starting {key}", error) from error
        return _DiskWriter(self, key, nbytes, fd, path)

    def get(self, key: ObjectKey) -> Lease | None:
        with self._changed:
            self._require_open()
            held = self._ledger.use(key)
            if held is None:
                self._misses += 1
                return None
            file = held.file()
            if file is not None:
                self._hits += 1
                return _DiskLease(self, file)
            held.opening += 1
        try:
            file = self._open(held)
        finally:
            with self._changed:
                held.opening -= 1
                if file is not None:
                    self._hits += 1
                    file = held.share(file)
        return _DiskLease(self, file) if file is not None else None

    def contains(self, key: ObjectKey) -> bool:
        with self._changed:
            self._require_open()
            return key in self._ledger

    def variants(self, content: str) -> tuple[str, ...]:
        check_content("content", content)
        with self._changed:
            self._require_open()
            return self._ledger.variants(content)

    def remove(self, key: ObjectKey) -> bool:
        with self._changed:
            self._require_open()
            held = self._ledger.find(key)
            if held is None:
                return False
            self._ledger.put_aside(held)
            self._moving.add(key)
        try:
            self._directory.remove(key)
            with self._changed:
                self._ledger.depart(held)
        except OSError as error:
            with self._changed:
                self._ledger.bring_back(held)
            raise self._failed(f"removing {key}", error) from error
        finally:
            self._moved([key])
        return True

    def keys(self) -> Iterator[ObjectKey]:
        with self._changed:
            self._require_open()
            return iter(self._ledger.keys())

    def stats(self) -> TierStats:
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
                quarantined=len(self._quarantine),
            )

    def check_integrity(self) -> None:
        """Raise :class:`StoreError` unless the ledger adds up and every object's file has the size it says.

        An object whose file another process has removed is reported too: it is a miss when it is asked for.
        """
        with self._changed:
            self._require_open()
            self._ledger.check()
            held_now = self._ledger.objects()
        for held in held_now:
            found = self._size_on_disk(held)
            if found == held.nbytes:
                continue
            with self._changed:
                if self._ledger.find(held.key) is held:
                    raise StoreError(f"{self.name}: {held.key}: ledger says {held.nbytes} bytes, disk says {found}")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ledger.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: the tier has been closed")

    def _failed(self, doing: str, error: OSError | StoreError) -> TierUnavailable:
        """Count a fault and return it as the error to raise."""
        with self._changed:
            self._failures += 1
        reason = describe(error) if isinstance(error, OSError) else str(error)
        _log.warning("%s: %s: %s", self.name, doing, reason)
        return TierUnavailable(f"{self.name}: {doing}: {reason}")

    def _moved(self, keys: list[ObjectKey]) -> None:
        with self._changed:
            self._moving.difference_update(keys)
            self._changed.notify_all()

    def _size_on_disk(self, held: StoredFile) -> int | None:
        try:
            fd = self._io.open(self._directory.path_of(held.key), READ)
        except OSError:
            return None
        try:
            return self._io.stat(fd).st_size
        finally:
            close(self._io, fd)

    def _make_room(self, nbytes: int) -> None:
        """Reserve ``nbytes``; remove the files of what has to go for it, before a byte of the new one is written."""
        with self._changed:
            self._require_open()
            victims = self._reserve(nbytes)
            keys = [held.key for held in victims if held.aside is None]
            self._moving.update(keys)
        left = list(victims)
        try:
            while left:
                self._directory.discard(left[-1].aside or self._directory.path_of(left[-1].key))
                left.pop()
        except OSError as error:
            with self._changed:
                self._ledger.cancel(nbytes)
                for held in left:
                    self._restore(held)
            raise self._failed(f"evicting {left[-1].key}", error) from error
        finally:
            self._moved(keys)

    def _reserve(self, nbytes: int) -> list[StoredFile]:
        """Reserve ``nbytes`` and return whose files must go: what is quarantined first, then least recently used."""
        scrap = []
        while self._quarantine and self._ledger.used + nbytes > self._ledger.capacity >= nbytes:
            scrap.append(self._quarantine.pop(0))
            self._ledger.drop_aside(scrap[-1].nbytes)
        try:
            return scrap + self._ledger.reserve(nbytes)
        except ResourceExhausted:
            for held in scrap:
                self._restore(held)
            raise

    def _restore(self, held: StoredFile) -> None:
        if held.aside is None:
            self._ledger.undo_eviction(held)
        else:
            self._quarantine.append(held)
            self._ledger.count_aside(held.nbytes)

    def _open(self, held: StoredFile) -> OpenFile | None:
        """Open an object's file and verify its header; ``None`` when another process has removed it."""
        try:
            fd = self._io.open(self._directory.path_of(held.key), READ)
        except FileNotFoundError:
            with self._changed:
                self._misses += 1
                if self._ledger.find(held.key) is held:
                    self._ledger.remove(held)
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
        if isinstance(error, OSError):
            return self._failed(f"reading {held.key}", error)
        return self._corrupt(held, str(error))

    def _corrupt(self, held: StoredFile, reason: str) -> ObjectCorrupt:
        """Count a corrupt object, move its file out of the way and return the error to raise."""
        _log.warning("%s: %s is corrupt: %s", self.name, held.key, reason)
        error = ObjectCorrupt(f"{self.name}: {held.key}: {reason}")
        with self._changed:
            self._failures += 1
            if self._ledger.find(held.key) is not held:
                return error
            self._ledger.put_aside(held)
            self._moving.add(held.key)
        try:
            moved = self._directory.set_aside(held.key)
            with self._changed:
                self._quarantine.append(StoredFile(held.key, held.nbytes, moved))
        except FileNotFoundError:  # another process was faster
            with self._changed:
                self._ledger.depart(held)
        except OSError as failure:
            _log.warning("%s: %s cannot be moved away: %s", self.name, held.key, describe(failure))
            with self._changed:
                self._ledger.bring_back(held)
        finally:
            self._moved([held.key])
        return error

    def _publish(self, key: ObjectKey, nbytes: int, temporary: str) -> bool:
        """Make a finished temporary the object, unless one is there; what fails leaves nothing."""
        with self._changed:
            while key in self._moving:
                self._changed.wait()
            self._require_open()
            if key in self._ledger:
                return False
            self._moving.add(key)
        try:
            self._directory.publish(temporary, key)
            with self._changed:
                self._ledger.settle(StoredFile(key, nbytes))
        except OSError as error:
            self._erase(self._directory.path_of(key))
            raise self._failed(f"committing {key}", error) from error
        finally:
            self._moved([key])
        return True

    def _erase(self, path: str) -> None:
        """Remove a file after a failure; if that fails too, starting up removes or adopts it."""
        try:
            self._directory.discard(path)
        except OSError as error:
            _log.warning("%s: %s cannot be removed: %s", self.name, path, describe(error))


class _DiskWriter(Writer):
    def __init__(self, tier: DiskTier, key: ObjectKey, nbytes: int, fd: int, path: str) -> None:
        super().__init__(key, nbytes)
        self._tier = tier
        self._fd = fd
        self._path = path

    def _write(self, offset: int, view: memoryview) -> None:
        with self._tier._changed:
            self._tier._require_open()
        try:
            write_all(self._tier._io, self._fd, view, offset)
        except OSError as error:
            raise self._tier._failed(f"writing {self.key}", error) from error

    def _commit(self) -> bool:
        tier = self._tier
        try:
            read_header(tier._io, self._fd, self.key, self.nbytes)
            if tier._fsync:
                tier._io.fsync(self._fd)
        except OSError as error:
            raise tier._failed(f"committing {self.key}", error) from error
        stored = tier._publish(self.key, self.nbytes, self._path)
        if stored:
            close(tier._io, self._fd)
        return stored

    def _revoke(self) -> None:
        self._tier._erase(self._path)
        close(self._tier._io, self._fd)
        with self._tier._changed:
            self._tier._ledger.cancel(self.nbytes)


class _DiskLease(Lease):
    def __init__(self, tier: DiskTier, file: OpenFile) -> None:
        super().__init__(file.header, tier.name)
        self._tier = tier
        self._file: OpenFile | None = file

    def layer(self, layer: int, into: memoryview | None = None) -> memoryview:
        return self._read(*self.header.layer_range(layer), into, partial(self.header.verify_layer, layer))

    def payload(self, into: memoryview | None = None) -> memoryview:
        header = self.header
        return self._read(header.header_nbytes, header.payload_nbytes, into, header.verify_payload)

    def _read(
        self, offset: int, nbytes: int, into: memoryview | None, verify: Callable[[memoryview], None]
    ) -> memoryview:
        file = self._file
        if file is None:
            raise self._released()
        target = destination(into, nbytes) if into is not None else allocate(nbytes).data
        try:
            view = read_range(self._tier._io, file.fd, offset, target)
            verify(view)
        except (ObjectCorrupt, OSError) as error:
            raise self._tier._read_error(file.held, error) from error
        return view

    def release(self) -> None:
        self._file = None

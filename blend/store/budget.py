"""The bytes that all processes on one directory have spent together: one locked record, and a file for each process.

::

    ledger                   the record: magic, bytes spent, how often the directory was opened, how many objects
                             were put, how often the directory was measured, how many tenants follow, xxh3_64 of those;
                             then for each tenant: its tag, bytes spent by it, xxh3_64 of those
    sessions/<16 hex digits> one for each open tier, locked for as long as that lives

The directory itself is the truth, since a writer's file has its full length from the start, and the record is its
sum. It is raised before a file is made and lowered after one is gone, so that a process killed in between can only
leave it too high. Whoever runs short of room and finds a session that nobody locks, or a record that fails its check,
measures the directory anew. What a process has removed and still reads is in no directory: each adds its own when it
finds that another one has measured.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import xxhash

from blend.store.fileio import CREATE, RECORD, FileIO, close, describe
from blend.store.key import TENANT_NBYTES

_log = logging.getLogger(__name__)

_MAGIC = b"blendbu2"
_RECORD = struct.Struct("<8sQQQQQQ")
_ROW = struct.Struct("<8sQQ")
_SUM = struct.Struct("<Q")
_SESSION = re.compile("[0-9a-f]{16}")


class SharedBudget:
    """What is spent of a directory. Any number of tiers, in any processes, may hold one on the same directory.

    Attributes and methods need :meth:`held`, but for :meth:`peek_puts`, :meth:`doubt` and :meth:`close`.

    Attributes:
        used: bytes spent.
        puts: objects that have ever been put, by all.
        seen: how many those were when all names were last measured or put here: with as many, there are no others.

    Args:
        io: the system calls.
        directory: the store's directory.
        measure: returns the bytes that are in the directory, by tenant tag; called while this is held.
        hidden: returns those that this process has spent and that are not there; called while this is held.

    Raises:
        OSError: the record or the session cannot be made.
    """

    def __init__(
        self,
        io: FileIO,
        directory: str,
        measure: Callable[[], Mapping[str, int]],
        hidden: Callable[[], Mapping[str, int]],
    ) -> None:
        self.used = 0
        self.puts = 0
        self.seen: int | None = None
        self._io = io
        self._path = f"{directory}/ledger"
        self._sessions = f"{directory}/sessions"
        self._measure = measure
        self._hidden = hidden
        self._lock = threading.Lock()
        self._fd = -1
        self._session_fd = -1
        self._session = f"{self._sessions}/{os.urandom(8).hex()}"
        self._opened = self._opened_by_me = 0
        self._measured = self._measured_seen = 0
        self._tenants = 0
        # Where each tenant's row is, as far as the rows have been read.
        self._rows: dict[str, int] = {}
        self._rows_read = 0
        self._was_alone = False
        self._doubted = False
        self._begin()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other thread and process from spending; the record is as it is now.

        Raises:
            OSError: it cannot be locked or read.
        """
        with self._lock:
            self._lock_record()
            try:
                self._load()
                yield
            finally:
                self._io.unlock(self._fd)

    def spend(self, tenant: str, nbytes: int) -> None:
        """Count bytes that a tenant is about to use; :class:`OSError` when that cannot be recorded."""
        self._add(tenant, nbytes)
        self.used += nbytes
        self._store()

    def refund(self, shares: Mapping[str, int]) -> None:
        """Stop counting bytes, by tenant. What cannot be recorded is measured the next time."""
        self.used = max(0, self.used - sum(shares.values()))
        try:
            for tenant, nbytes in shares.items():
                self._add(tenant, -nbytes)
            self._store()
        except OSError as error:
            self._doubted = True
            _log.warning("%s: %s", self._path, describe(error))

    def share(self, tenant: str) -> int:
        """Return the bytes that one tenant has spent; :class:`OSError` when that cannot be found out."""
        found = self._row(tenant)
        if found is None:
            self.recount()
            found = self._row(tenant)
        if found is None:
            raise self._damaged()
        return found

    def shares(self) -> dict[str, int]:
        """Return the bytes spent by every tenant; :class:`OSError` when that cannot be found out."""
        for _ in range(2):
            raw = self._io.read_record(self._fd, self._tenants * _ROW.size, _row_at(0))
            rows = [raw[at : at + _ROW.size] for at in range(0, len(raw), _ROW.size)]
            if len(rows) == self._tenants and all(row == _signed(row) for row in rows):
                return {row[:TENANT_NBYTES].hex(): _ROW.unpack(row)[1] for row in rows}
            self.recount()
        raise self._damaged()

    def count_put(self) -> None:
        """Count an object that appears; :class:`OSError` when that cannot be recorded."""
        nobody_else = self.seen == self.puts
        self.puts += 1
        self._store()
        if nobody_else:
            self.seen = self.puts

    def peek_puts(self) -> int | None:
        """Return how many objects have been put by all processes, without the lock; ``None`` if that is unknown."""
        raw = self._read()
        return _RECORD.unpack(raw)[3] if raw is not None else None

    def recount(self) -> None:
        """Measure the directory and drop sessions that ended without a word."""
        _, self._was_alone = self._visit()
        self._opened_by_me = self._opened
        shares = Counter(self._measure())
        shares.update(self._hidden())
        self.used = sum(shares.values())
        self.seen = self.puts
        self._measured += 1
        self._measured_seen = self._measured
        self._doubted = False
        self._write_rows(shares)
        self._store()

    def settle_deaths(self) -> bool:
        """Recount if a session has died or the record is in doubt; return whether that was so."""
        dead, _ = self._visit()
        if dead:
            self.recount()
        return dead

    def doubt(self) -> None:
        """Have the directory measured the next time: it holds something else than what was recorded."""
        self._doubted = True

    @property
    def alone(self) -> bool:
        """Whether nobody else can have changed the directory since it was last measured here."""
        return self._was_alone and self._opened == self._opened_by_me

    def close(self) -> None:
        """End the session; safe to call again. Late refunds still work."""
        with self._lock:
            if self._session_fd >= 0:
                try:
                    self._io.unlink(self._session)
                except OSError as error:
                    _log.debug("%s: %s", self._session, describe(error))
                close(self._io, self._session_fd)
                self._session_fd = -1

    def __del__(self) -> None:
        for fd in (self._session_fd, self._fd):
            if fd >= 0:
                close(self._io, fd)

    def _begin(self) -> None:
        try:
            self._io.mkdir(self._sessions)
        except FileExistsError:
            _log.debug("%s is there", self._sessions)
        with self._lock:
            self._lock_record()
            try:
                self._session_fd = self._io.open(self._session, CREATE)
                self._io.wait_lock(self._session_fd)
                dead, alone = self._visit()
                self._load()
                self._opened += 1
                if dead or alone or self._doubted:
                    self.recount()
                else:
                    self._store()
            finally:
                self._io.unlock(self._fd)

    def _lock_record(self) -> None:
        """Lock the file that has the record's name now: the directory may have been removed and made again."""
        while True:
            if self._fd < 0:
                self._fd = self._io.open(self._path, RECORD)
            self._io.wait_lock(self._fd)
            if self._io.stat(self._fd).st_nlink:
                return
            close(self._io, self._fd)
            self._fd = -1
            self._rows, self._rows_read = {}, 0

    def _load(self) -> None:
        """Take over what others have recorded; measure where that is missing, damaged or in doubt."""
        raw = self._read()
        if raw is not None:
            _, self.used, self._opened, self.puts, self._measured, self._tenants, _ = _RECORD.unpack(raw)
        else:
            self._doubted = True
        if self._doubted and self._opened:
            self.recount()
        elif self._measured != self._measured_seen:
            self._measured_seen = self._measured
            self._rows, self._rows_read = {}, 0
            for tenant, nbytes in self._hidden().items():
                self.spend(tenant, nbytes)

    def _read(self) -> bytes | None:
        """Return the record, or ``None`` if it fails its check."""
        raw = self._io.read_record(self._fd, _RECORD.size)
        good = len(raw) == _RECORD.size and raw.startswith(_MAGIC)
        return raw if good and raw == _signed(raw) else None

    def _store(self) -> None:
        counts = (self.used, self._opened, self.puts, self._measured, self._tenants)
        self._write(_signed(_RECORD.pack(_MAGIC, *counts, 0)), 0)

    def _write(self, data: bytes, offset: int) -> None:
        try:
            self._io.write_record(self._fd, data, offset)
        except OSError:
            self._doubted = True
            raise

    def _damaged(self) -> OSError:
        return OSError(errno.EIO, f"{self._path}: damaged as soon as it was written")

    def _read_rows(self) -> bool:
        """Find the rows that were added since this was last done; return whether all are sound."""
        count = self._tenants - self._rows_read
        raw = self._io.read_record(self._fd, count * _ROW.size, _row_at(self._rows_read)) if count > 0 else b""
        for at in range(0, len(raw) - _ROW.size + 1, _ROW.size):
            row = raw[at : at + _ROW.size]
            if row != _signed(row):
                break
            self._rows[row[:TENANT_NBYTES].hex()] = self._rows_read
            self._rows_read += 1
        return self._rows_read >= self._tenants

    def _row(self, tenant: str) -> int | None:
        """Return what a tenant's row says, 0 where it has none, or ``None`` if the rows are damaged."""
        if tenant not in self._rows and not self._read_rows():
            return None
        number = self._rows.get(tenant)
        if number is None:
            return 0
        raw = self._io.read_record(self._fd, _ROW.size, _row_at(number))
        if len(raw) != _ROW.size or raw != _signed(raw) or raw[:TENANT_NBYTES].hex() != tenant:
            return None
        return int(_ROW.unpack(raw)[1])

    def _add(self, tenant: str, nbytes: int) -> None:
        """Change a tenant's row; a damaged one is measured the next time."""
        found = self._row(tenant)
        if found is None:
            self._doubted = True
            return
        number = self._rows.get(tenant)
        if number is None and nbytes <= 0:
            return
        if number is None:
            number = self._rows[tenant] = self._tenants
            self._tenants = self._rows_read = number + 1
        self._write(_pack(tenant, max(0, found + nbytes)), _row_at(number))

    def _write_rows(self, shares: Mapping[str, int]) -> None:
        """Replace all rows. Until the record is written too there is none: whoever comes in between measures."""
        self._write(bytes(_RECORD.size), 0)
        self._rows = {tenant: number for number, tenant in enumerate(shares)}
        self._tenants = self._rows_read = len(shares)
        self._write(b"".join(_pack(tenant, nbytes) for tenant, nbytes in shares.items()), _row_at(0))

    def _visit(self) -> tuple[bool, bool]:
        """Remove sessions that died; return whether there were any, and whether no other one lives."""
        dead, alone = False, True
        try:
            names = self._io.names(self._sessions)
        except FileNotFoundError:
            names = []  # somebody removed the directory
        for name in names:
            path = f"{self._sessions}/{name}"
            if path == self._session or not _SESSION.fullmatch(name):
                continue
            try:
                fd = self._io.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # it ended by itself meanwhile
            try:
                if self._io.lock(fd):
                    dead = True
                    self._io.unlink(path)
                else:
                    alone = False
            finally:
                close(self._io, fd)
        return dead, alone


def _signed(record: bytes) -> bytes:
    """Return a record with the checksum of what comes before it as its last 8 bytes."""
    body = record[: -_SUM.size]
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _pack(tenant: str, nbytes: int) -> bytes:
    return _signed(_ROW.pack(bytes.fromhex(tenant), nbytes, 0))


def _row_at(number: int) -> int:
    return _RECORD.size + number * _ROW.size

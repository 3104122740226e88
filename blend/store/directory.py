"""The disk tier's directory: what is where, and who may use it.

::

    layout                                 text: "blend-store 1"
    quotas                                 text: what each tenant may hold, as it was last set
    ledger, sessions/                      what all processes have spent (see blend.store.budget)
    secret                                 32 random bytes that key every name (see blend.store.secret)
    objects/<2 hex digits>/<object key>    one object a file
    objects/<2 hex digits>/<object key>.<16 hex digits>.tmp    being written; locked by its writer
    quarantine/<object key>.<8 hex digits> objects whose bytes failed a check

Directories that the store makes have mode 0700, its files 0600.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from blend.errors import InvalidInput, TierUnavailable
from blend.store.fileio import CREATE, READ, FileIO, describe, read_into, sync_directory, write_all
from blend.store.key import ObjectKey
from blend.store.tenants import Quotas

DIRECTORY_VERSION = 1
_MARK = "blend-store"
_TEMPORARY = ".tmp"
_OWN = ("layout", "quotas", "ledger", "sessions", "objects", "quarantine")
_ATTEMPTS = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """What is in a store's directory.

    Attributes:
        objects: ``(modification time in ns, key, bytes)`` of each, oldest first.
        quarantined: ``(modification time in ns, path, key, bytes)`` of each, oldest first.
        pending: bytes that live writers have reserved, by tenant tag.
    """

    objects: list[tuple[int, ObjectKey, int]]
    quarantined: list[tuple[int, str, ObjectKey, int]]
    pending: Counter[str]

    @property
    def nbytes(self) -> int:
        """All bytes of the directory that count."""
        return sum(self.shares.values())

    @property
    def shares(self) -> Counter[str]:
        """Those bytes by tenant tag."""
        found = self.pending.copy()
        for _, key, nbytes in self.objects:
            found[key.tenant] += nbytes
        for _, _, key, nbytes in self.quarantined:
            found[key.tenant] += nbytes
        return found


def private_directory(io: FileIO, path: Path) -> None:
    """Make ``path`` a directory that this user may keep files in.

    Raises:
        TierUnavailable: it is something else, belongs to somebody else, cannot be made, or cannot be written.
    """
    missing = []
    try:
        for folder in (path, *path.parents):
            if folder.exists():
                break
            missing.append(folder)
        for folder in reversed(missing):
            _make(io, str(folder))
        found = os.stat(path)
    except NotADirectoryError as error:
        raise TierUnavailable(f"{path}: a part of this path is a file; give a directory") from error
    except OSError as error:
        raise TierUnavailable(f"{path}: {describe(error)}; give a directory that can be made and written") from error
    if not stat.S_ISDIR(found.st_mode):
        raise TierUnavailable(f"{path}: is a file; give a directory")
    _require_own(str(path), found)


def _require_own(path: str, found: os.stat_result) -> None:
    """Refuse a file or a directory that this user does not own, or may not read and write."""
    if found.st_uid != os.geteuid():
        raise TierUnavailable(
            f"{path}: belongs to user {found.st_uid}, this process to {os.geteuid()}; give a directory of your own"
        )
    wanted, mode = os.R_OK | os.W_OK, "u+rw"
    if stat.S_ISDIR(found.st_mode):
        wanted, mode = wanted | os.X_OK, "u+rwx"
    if not os.access(path, wanted, effective_ids=os.access in os.supports_effective_ids):
        raise TierUnavailable(
            f"{path}: this process may not read and write there; allow it (chmod {mode}, or mount it writable), "
            "or give another directory"
        )


def _make(io: FileIO, path: str) -> bool:
    try:
        io.mkdir(path)
    except FileExistsError:
        return False
    return True


class StoreDirectory:
    """Names and layout of one store's files. Opening it makes what is missing.

    Args:
        path: the directory.
        io: the system calls.
        fsync: whether new names are flushed to the device.

    Raises:
        TierUnavailable: the directory cannot be used, or has a newer layout.
    """

    def __init__(self, path: Path, io: FileIO, fsync: bool) -> None:
        private_directory(io, path)
        self.path = str(path)
        self.objects = f"{path}/objects"
        self.quarantine = f"{path}/quarantine"
        self._io = io
        self._fsync = fsync
        try:
            self._check_owner()
            self._check_mark()
            for folder in (self.objects, self.quarantine):
                _make(io, folder)
        except OSError as error:
            raise TierUnavailable(f"{path}: {describe(error)}; give a directory that can be written") from error

    def folder_of(self, key: ObjectKey) -> str:
        """Return the directory of an object's file."""
        return f"{self.objects}/{key.content[:2]}"

    def path_of(self, key: ObjectKey) -> str:
        """Return the path of an object's file."""
        return f"{self.objects}/{key.content[:2]}/{key}"

    def create_temporary(self, key: ObjectKey, nbytes: int) -> tuple[int, str]:
        """Return descriptor and path of a new, locked file beside where the object will be.

        It has its full length at once, so that the directory shows what is reserved, and no space before it is
        written.
        """
        io = self._io
        for _ in range(_ATTEMPTS):
            path = f"{self.path_of(key)}.{os.urandom(8).hex()}{_TEMPORARY}"
            try:
                fd = io.open(path, CREATE)
            except FileNotFoundError:
                self._make_folder(key)
                continue
            try:
                # Whoever starts up in between may take the file for a dead writer's and remove it.
                if io.lock(fd) and io.stat(fd).st_nlink:
                    io.truncate(fd, nbytes)
                    return fd, path
            except OSError:
                io.close(fd)
                self.discard(path)
                raise
            io.close(fd)
        raise TierUnavailable(f"{self.folder_of(key)}: no file could be made in {_ATTEMPTS} attempts")

    def publish(self, temporary: str, key: ObjectKey) -> None:
        """Give a finished temporary its object's name."""
        self._io.rename(temporary, self.path_of(key))

    def find(self, key: ObjectKey) -> int | None:
        """Return the length of an object's file, or ``None`` when there is none."""
        try:
            found = self._io.find(self.path_of(key))
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def changed_at(self, prefix: str) -> int:
        """Return when names last came or went in one directory of objects, in ns; 0 when there is none."""
        try:
            return self._io.find(f"{self.objects}/{prefix}").st_mtime_ns
        except FileNotFoundError:
            return 0

    def list_folder(self, prefix: str) -> list[ObjectKey]:
        """Return the keys in one directory of objects."""
        try:
            names = self._io.names(f"{self.objects}/{prefix}")
        except FileNotFoundError:
            return []
        keys = (_parse(name) for name in names if not name.endswith(_TEMPORARY))
        return [key for key in keys if key is not None and key.content.startswith(prefix)]

    def discard(self, path: str) -> bool:
        """Remove a file; return False when it is not there."""
        try:
            self._io.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def sync_folder(self, key: ObjectKey) -> None:
        """Make what happened to an object's name last, when ``fsync`` is on."""
        if self._fsync:
            sync_directory(self._io, self.folder_of(key))

    def set_aside(self, key: ObjectKey) -> str:
        """Move an object's file to the quarantine; return its new path."""
        _make(self._io, self.quarantine)
        target = f"{self.quarantine}/{key}.{os.urandom(4).hex()}"
        self._io.rename(self.path_of(key), target)
        return target

    def scan(self) -> Contents:
        """Return what is in the directory; remove what dead writers left."""
        objects: list[tuple[int, ObjectKey, int]] = []
        pending: Counter[str] = Counter()
        for prefix, info in self._entries(self.objects):
            if not stat.S_ISDIR(info.st_mode):
                continue
            for name, entry in self._entries(f"{self.objects}/{prefix}"):
                if not stat.S_ISREG(entry.st_mode):
                    continue
                if name.endswith(_TEMPORARY):
                    writing = _parse(name.removesuffix(_TEMPORARY).rpartition(".")[0])
                    if writing is not None and self._sweep(f"{self.objects}/{prefix}/{name}"):
                        pending[writing.tenant] += entry.st_size
                    continue
                key = _parse(name)
                if key is not None and key.content.startswith(prefix):
                    objects.append((entry.st_mtime_ns, key, entry.st_size))
        aside = []
        for name, entry in self._entries(self.quarantine):
            key = _parse(name.rpartition(".")[0])
            if key is not None and stat.S_ISREG(entry.st_mode):
                aside.append((entry.st_mtime_ns, f"{self.quarantine}/{name}", key, entry.st_size))
        return Contents(sorted(objects), sorted(aside), pending)

    def note_quotas(self, quotas: Quotas) -> None:
        """Keep the quotas that are enforced, for whoever looks at the store from outside."""
        path, text = f"{self.path}/quotas", quotas.encode()
        if text:
            self._replace(path, text)
        else:
            self.discard(path)

    def _entries(self, path: str) -> list[tuple[str, os.stat_result]]:
        try:
            return list(self._io.listdir(path))
        except FileNotFoundError:
            return []  # another process or a person removed it

    def _make_folder(self, key: ObjectKey) -> None:
        _make(self._io, self.objects)
        if _make(self._io, self.folder_of(key)) and self._fsync:
            sync_directory(self._io, self.objects)

    def _sweep(self, path: str) -> bool:
        """Remove a temporary whose writer is dead: a live one holds its lock. Return whether it is still there."""
        try:
            fd = self._io.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if self._io.lock(fd):
                    self.discard(path)
                    return False
            finally:
                self._io.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("%s: left behind by a dead writer, and not removable: %s", path, describe(error))
        return True

    def _check_owner(self) -> None:
        for name in _OWN:
            path = f"{self.path}/{name}"
            try:
                found = self._io.find(path)
            except FileNotFoundError:
                continue
            _require_own(path, found)

    def _check_mark(self) -> None:
        path = f"{self.path}/layout"
        try:
            fd = self._io.open(path, READ)
        except FileNotFoundError:
            self._write_mark(path)
            return
        try:
            raw = bytearray(64)
            text = bytes(raw[: read_into(self._io, fd, memoryview(raw), 0)]).decode("ascii", "replace").split()
        finally:
            self._io.close(fd)
        if len(text) != 2 or text[0] != _MARK or not text[1].isdigit():
            raise TierUnavailable(f"{path}: not the mark of a store; give another directory, or an empty one")
        if int(text[1]) != DIRECTORY_VERSION:
            raise TierUnavailable(
                f"{self.path}: layout {text[1]}, but this version reads {DIRECTORY_VERSION}; "
                "use the version that wrote it, or another directory"
            )

    def _write_mark(self, path: str) -> None:
        self._replace(path, f"{_MARK} {DIRECTORY_VERSION}\n")

    def _replace(self, path: str, text: str) -> None:
        """Write a small file, all or nothing of it."""
        temporary = f"{path}.{os.urandom(8).hex()}{_TEMPORARY}"
        fd = self._io.open(temporary, CREATE)
        try:
            write_all(self._io, fd, memoryview(text.encode()), 0)
            if self._fsync:
                self._io.fsync(fd)
        except OSError:
            self.discard(temporary)
            raise
        finally:
            self._io.close(fd)
        self._io.rename(temporary, path)
        if self._fsync:
            sync_directory(self._io, self.path)


def _parse(name: str) -> ObjectKey | None:
    try:
        return ObjectKey.parse(name)
    except InvalidInput:
        return None  # somebody else's file: not ours to count or to touch

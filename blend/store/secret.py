"""The secret that keys a store's names, kept in its directory."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from blend.errors import TierUnavailable
from blend.store.directory import private_directory
from blend.store.fileio import CREATE, FileIO, describe, read_into, sync_directory, write_all

SECRET_NBYTES = 32


def load_secret(directory: str | Path) -> bytes:
    """Return the 32 random bytes in ``directory``, made on first use, readable by their owner alone.

    Any number of processes may ask at once; all get the same bytes.

    Raises:
        TierUnavailable: the directory or the file cannot be used, or the file has been damaged or opened to others.
    """
    io, path = FileIO(), Path(directory)
    private_directory(io, path)
    try:
        guard = io.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
            return _read(io, path / "secret") or _create(io, path / "secret")
        finally:
            io.close(guard)
    except OSError as error:
        raise TierUnavailable(f"{path}/secret: {describe(error)}") from error


def _read(io: FileIO, path: Path) -> bytes | None:
    try:
        fd = io.open(str(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = io.stat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise TierUnavailable(
                f"{path}: others may read it; set its owner and mode 0600, or remove it with its store"
            )
        raw = bytearray(SECRET_NBYTES + 1)
        nbytes = read_into(io, fd, memoryview(raw), 0)
    finally:
        io.close(fd)
    if nbytes != SECRET_NBYTES:
        raise TierUnavailable(
            f"{path}: not {SECRET_NBYTES} bytes; restore it, or remove it, which gives up everything stored under it"
        )
    return bytes(raw[:SECRET_NBYTES])


def _create(io: FileIO, path: Path) -> bytes:
    secret = os.urandom(SECRET_NBYTES)
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    fd = io.open(temporary, CREATE)
    try:
        write_all(io, fd, memoryview(secret), 0)
        io.fsync(fd)
    except OSError:
        io.unlink(temporary)
        raise
    finally:
        io.close(fd)
    io.rename(temporary, str(path))
    sync_directory(io, str(path.parent))
    return secret

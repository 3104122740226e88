"""A data directory belongs to one server at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blend.errors import InvalidConfig
from blend.store.fileio import describe

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_PID_NBYTES = 20


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep every other server out of ``directory``, which is made where it is missing, inside the ``with`` block.

    The lock is the file ``lock`` in it, which says the process's id. It ends with the process, however that ends, and
    with those that it has forked. The store's own directory, wherever it is, may have several users.

    Raises:
        InvalidConfig: another server has the directory, or it cannot be made or written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(directory / "lock", _FLAGS, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        _take(file, directory)
        yield
    finally:
        os.close(file)


def _take(file: int, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, _PID_NBYTES, 0).decode("ascii", "replace").strip()
        process = f"process {owner}" if owner.isdigit() else "the other process"
        allowed = f"a directory that no other server uses; stop {process}, which does, or give another one"
        raise InvalidConfig("data_dir", str(directory), allowed) from None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            allowed = "a directory of a file system that has locks"
            raise InvalidConfig("data_dir", f"{directory}, {describe(error)}", allowed) from error
        raise _unusable(directory, error) from error
    with suppress(OSError):  # the id only informs: a full disk has no room for it, and the lock is held
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)


def _unusable(directory: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig("data_dir", f"{directory}, {describe(error)}", "a directory that can be made and written")

"""The system calls of the disk tier, behind one small class, so that a test can make any of them fail."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator

_log = logging.getLogger(__name__)

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FileIO:
    """Plain system calls; each raises ``OSError`` and may do less than it was asked for, as the system's do."""

    def open(self, path: str, flags: int) -> int:
        """Open a file, created with mode 0600 if at all; return its descriptor."""
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def stat(self, fd: int) -> os.stat_result:
        """Return what the system knows of an open file."""
        return os.fstat(fd)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read from ``offset`` into a buffer; return how many bytes came, 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at ``offset``; return how many bytes went."""
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        """Flush a file, or a directory's names, to the device."""
        os.fsync(fd)

    def lock(self, fd: int) -> bool:
        """Take the file's exclusive lock, which ends with its descriptor; return whether it was free."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing what has it."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a directory of mode 0700."""
        os.mkdir(path, 0o700)

    def listdir(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names in a directory and what the system knows of each, links not followed."""
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process removed it while we looked
                yield entry.name, found


def read_into(io: FileIO, fd: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` from ``offset`` on; return how many bytes there were, fewer only at the end of the file."""
    done = 0
    while done < len(into):
        got = io.pread(fd, into[done:], offset + done)
        if got == 0:
            break
        done += got
    return done


def write_all(io: FileIO, fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    done = 0
    while done < len(data):
        went = io.pwrite(fd, data[done:], offset + done)
        if went == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        done += went


def sync_directory(io: FileIO, path: str) -> None:
    """Flush the names in a directory to the device."""
    fd = io.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        io.fsync(fd)
    finally:
        io.close(fd)


def close(io: FileIO, fd: int) -> None:
    """Close a descriptor whose data no longer depends on it: read from, flushed, or given up."""
    try:
        io.close(fd)
    except OSError as error:
        _log.warning("closing a descriptor: %s", describe(error))


def describe(error: OSError) -> str:
    """Return an ``OSError`` in words: ``ENOSPC (No space left on device)``."""
    name = errno.errorcode.get(error.errno, "OSError") if error.errno is not None else "OSError"
    return f"{name} ({error.strerror or error})"

"""The system calls of the disk tier, behind one small class, so that a test can make any of them fail."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator

_log = logging.getLogger(__name__)

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_CACHED = getattr(os, "RWF_NOWAIT", 0)
LOCK_SECONDS = 30.0
RECORD = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


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

    def find(self, path: str) -> os.stat_result:
        """Return what the system knows of a name, links not followed."""
        return os.stat(path, follow_symlinks=False)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set a file's length; what is added reads as zeros and takes no space yet."""
        os.ftruncate(fd, nbytes)

    def read_record(self, fd: int, nbytes: int, offset: int = 0) -> bytes:
        """Return a record of a small file: as many bytes from ``offset`` on, or what there is of them."""
        return os.pread(fd, nbytes, offset)

    def write_record(self, fd: int, data: bytes, offset: int = 0) -> None:
        """Replace a record of a small file, all or nothing of it unless the device fails."""
        if os.pwrite(fd, data, offset) != len(data):
            raise OSError(errno.EIO, "a record was written in part")

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read from ``offset`` into a buffer; return how many bytes came, 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def cached(self, fd: int, offset: int) -> bool:
        """Return whether the system has the byte at ``offset`` in memory; False where it does not say."""
        try:
            return bool(_CACHED) and os.preadv(fd, [bytearray(1)], offset, _CACHED) == 1
        except OSError:
            return False

    def advise(self, fd: int, offset: int, nbytes: int) -> None:
        """Have the system begin to read a range, where it can be told to."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

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

    def wait_lock(self, fd: int) -> None:
        """Take the file's exclusive lock, which only another open descriptor can hold.

        Whoever has it has it for microseconds, unless that process has been stopped: after :data:`LOCK_SECONDS` it is
        an ``OSError``, since no request may wait without bound.
        """
        deadline, pause = time.monotonic() + LOCK_SECONDS, 1e-4
        while not self.lock(fd):
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"locked by another process for {LOCK_SECONDS} s")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def unlock(self, fd: int) -> None:
        """Give the file's lock back."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing what has it."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a directory of mode 0700."""
        os.mkdir(path, 0o700)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

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

"""Run as a script: for each line of its input, a child writes an object and is killed at that system call.

Usage: ``python -m tests.store.crash_writer DIRECTORY``. A line holds the seed of the object, the number of the call
at which the child dies, and the share of that call's bytes that it still writes. After each child it prints whether
it was killed (1) or lived to the end (0).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from blend.store import DiskTier, FileIO
from tests.store.helpers import make


class DeadlyIO(FileIO):
    """Kills its own process at the ``deadline``-th call that changes something on disk."""

    def __init__(self, deadline: int, share: float) -> None:
        self.left = deadline
        self.share = share

    def _step(self) -> bool:
        self.left -= 1
        return self.left == 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def open(self, path: str, flags: int) -> int:
        last = bool(flags & os.O_CREAT) and self._step()
        try:
            return super().open(path, flags)
        finally:
            if last:
                self._die()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        data = data[:1500]  # several calls an object, so that there is a middle
        if self._step():
            super().pwrite(fd, data[: int(len(data) * self.share)], offset)
            self._die()
        return super().pwrite(fd, data, offset)

    def write_record(self, fd: int, data: bytes, offset: int = 0) -> None:
        if self._step():
            if self.share > 0.5:
                super().write_record(fd, data, offset)
            self._die()
        super().write_record(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        if self._step():
            self._die()
        super().truncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        if self._step():
            self._die()
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        if self._step():
            if self.share > 0.5:
                super().rename(source, target)
            self._die()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        if self._step():
            if self.share > 0.5:
                super().unlink(path)
            self._die()
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        if self._step():
            self._die()
        super().mkdir(path)


def write(directory: str, seed: int, io: FileIO) -> NoReturn:
    """Put one object, and be gone."""
    code = 1
    try:
        DiskTier(directory, 3 * make(0, tokens=40)[0].object_nbytes, io=io).put(*make(seed, tokens=40))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    directory = sys.argv[1]
    for line in sys.stdin:
        seed, deadline, share = line.split()
        child = os.fork()
        if child == 0:
            write(directory, int(seed), DeadlyIO(int(deadline), float(share)))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{int(os.WIFSIGNALED(status)) if status in (0, signal.SIGKILL) else status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

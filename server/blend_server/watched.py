"""Files that are read again when they change."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from blend.errors import InvalidConfig

logger = logging.getLogger("blend_server")

T = TypeVar("T")

_Stamp: TypeAlias = tuple[tuple[int, int, int, int] | None, ...]


class Watched(Generic[T]):
    """What ``read`` makes of some files. Thread-safe.

    Args:
        what: what the files are, for the log.
        paths: the files.
        read: makes a value of them, or raises ``InvalidConfig``.

    Raises:
        InvalidConfig: the files cannot be used now, at the start.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamp = self._now()
        self.value = read()
        """What the files said when they last could be used."""

    @property
    def changed(self) -> bool:
        """Whether the files are others than those that were read last."""
        return self._now() != self._stamp

    def refresh(self) -> bool:
        """Read the files if they have changed; return whether there is a new value.

        Files that cannot be used leave the value as it was: the log says so, once for each change.
        """
        with self._lock:
            stamp = self._now()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            try:
                self.value = self._read()
            except InvalidConfig as error:
                logger.error("event=reload_failed what=%s kept=previous error=%s", self._what, error)
                return False
            logger.info("event=reloaded what=%s", self._what)
            return True

    def _now(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

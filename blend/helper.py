"""A second thread for work that falls into pieces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from blend.worker import Worker

_Piece = TypeVar("_Piece")
_MAX_WAITING = 64
"""Most calls that wait for the thread. Any number will do: a caller whose part is not queued does it alone."""


class Helper:
    """A thread that takes part in the work of whoever calls :meth:`each`. It begins with the first one.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._worker = Worker(name, _MAX_WAITING)

    def each(self, work: Callable[[_Piece], object], pieces: Sequence[_Piece]) -> None:
        """Call ``work`` once for each piece, in the caller's thread and in the other one where that is free.

        When it returns or raises, no call is under way. After a call has raised, no other begins, and its error is
        raised. Works without the other thread when that is closed.
        """
        if len(pieces) == 1:
            work(pieces[0])
            return
        left = deque(pieces)
        errors: list[BaseException] = []

        def drain() -> None:
            while not errors:
                try:
                    piece = left.popleft()
                except IndexError:
                    return
                try:
                    work(piece)
                except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                    errors.append(error)

        part = _Part(drain)
        try:
            if left:
                self._worker.submit(part.run)
            drain()
        finally:  # whatever interrupts it
            part.end()
        if errors:
            # An interrupt, whichever came first: whoever handles errors of the work would take it for one.
            error = next((error for error in errors if not isinstance(error, Exception)), errors[0])
            try:
                raise error
            finally:
                del error
                errors.clear()  # else they and the frames that they hold would hold each other

    def close(self) -> None:
        """End the thread. Safe to call again."""
        self._worker.close()


class _Part:
    """What the other thread does of one call, unless the caller is done before that begins."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain: Callable[[], None] | None = drain
        self._lock = threading.Lock()

    def run(self) -> None:
        with self._lock:
            if self._drain is not None:
                self._drain()

    def end(self) -> None:
        """Wait for the part that has begun; let none begin. What interrupts that is raised when it has ended."""
        interrupts: list[BaseException] = []
        while self._drain is not None:
            try:
                with self._lock:
                    self._drain = None
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupts.append(error)
        if interrupts:
            try:
                raise interrupts[0]
            finally:
                interrupts.clear()

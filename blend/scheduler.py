"""Who may use the model now: requests in order of arrival, work of lower priority in the gaps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Generic, TypeVar

from blend.errors import Closed

_log = logging.getLogger(__name__)
_Key = TypeVar("_Key", bound=Hashable)


PATIENCE = 10.0
"""Seconds that background work waits for open requests to end before it slips in between two of their steps."""


class Turns:
    """A fair lock with two classes. A waiting request always goes before background work.

    A request takes a turn for every step. Between :meth:`request`'s enter and exit it is *open*, and background
    work keeps out of the gaps between its steps, for at most ``patience`` seconds: a stream that nobody reads
    must not stop it for good.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._open = 0
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self._background: deque[object] = deque()
        self._busy = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        with self._condition:
            return len(self._queue)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Be an open request inside the ``with`` block."""
        with self._condition:
            self._open += 1
        try:
            yield
        finally:
            with self._condition:
                self._open -= 1
                self._condition.notify_all()

    @contextmanager
    def turn(self, *, background: bool = False) -> Iterator[float]:
        """Wait for a turn and hold it inside the ``with`` block; yields the wait in milliseconds.

        Raises:
            Closed: the turns were closed before this one came.
        """
        start = perf_counter()
        ticket = object()
        mine = self._background if background else self._queue
        with self._condition:
            mine.append(ticket)
            try:
                if background:
                    self._condition.wait_for(lambda: self._closed or not self._open, self._patience)
                self._condition.wait_for(lambda: self._closed or self._may_go(ticket, background))
                if self._closed:
                    raise Closed("the engine is closed")
                self._busy = True
            finally:
                mine.remove(ticket)
                self._condition.notify_all()
        try:
            yield (perf_counter() - start) * 1e3
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _may_go(self, ticket: object, background: bool) -> bool:
        if self._busy:
            return False
        if background:
            return not self._queue and self._background[0] is ticket
        return self._queue[0] is ticket

    def close(self) -> None:
        """Refuse everybody who waits or comes later, and return once nobody holds a turn."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._busy)


class Background(Generic[_Key]):
    """One thread that works off a bounded queue in the gaps between requests. Work that does not fit is dropped.

    The same key is queued once. ``work`` runs inside a background turn; an error is logged and counted, and the
    thread goes on.
    """

    def __init__(self, turns: Turns, work: Callable[[_Key], None], name: str, limit: int = 256) -> None:
        self._turns = turns
        self._work = work
        self._limit = limit
        self._condition = threading.Condition()
        self._queue: dict[_Key, None] = {}
        self._running = False
        self._closed = False
        self.done = 0
        self.failed = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, key: _Key) -> bool:
        """Queue ``key`` unless it is queued already; returns whether it is queued now."""
        with self._condition:
            if key in self._queue:
                return True
            if self._closed or len(self._queue) >= self._limit:
                self.dropped += 1
                return False
            self._queue[key] = None
            self._condition.notify_all()
            return True

    def discard(self, unwanted: Callable[[_Key], bool]) -> None:
        """Take every queued key that ``unwanted`` is true of out of the queue."""
        with self._condition:
            self._queue = {key: None for key in self._queue if not unwanted(key)}
            self._condition.notify_all()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is done; returns whether it is (``timeout`` in seconds)."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._running, timeout)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or bool(self._queue))
                if self._closed:
                    return
            try:
                with self._turns.turn(background=True):
                    self._work_off_one()
            except Closed:
                with self._condition:
                    self._closed = True

    def _work_off_one(self) -> None:
        """Run the first key. It leaves the queue inside the turn: until then it can be discarded."""
        with self._condition:
            key = next(iter(self._queue), None)
            if key is None:
                return
            del self._queue[key]
            self._running = True
        try:
            self._work(key)
            self.done += 1
        except Exception:  # noqa: BLE001 - whatever one piece of work does, the thread has to go on
            self.failed += 1
            _log.exception("background work failed")
        finally:
            with self._condition:
                self._running = False
                self._condition.notify_all()

    def close(self) -> None:
        """Drop what is queued, let the running piece finish, and join the thread."""
        with self._condition:
            self._closed = True
            self.dropped += len(self._queue)
            self._queue.clear()
            self._condition.notify_all()
        self._thread.join()

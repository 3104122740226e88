"""Calls that may stall, made on threads of their own, so that whoever asks waits no longer than agreed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from blend.errors import Closed, TierUnavailable

T = TypeVar("T")
_log = logging.getLogger(__name__)


class DeadlineWorkers:
    """A few daemon threads before a bounded queue.

    A call that outlasts its caller goes on: its thread keeps everything it refers to alive, so that memory which a
    library may still write to is not used again before the call has returned.

    Args:
        name: what threads and errors are called by.
        threads: how many calls may be under way.
        waiting: how many more may wait.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self.name = name
        self.late = 0
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting)
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], seconds: float) -> None:
        """Let a thread run ``job``; wait at most ``seconds`` for a place in the queue.

        Raises:
            TierUnavailable: there was none in time.
            Closed: the workers have been closed.
        """
        if self._closed:
            raise Closed(f"{self.name}: the workers have been closed")
        try:
            self._queue.put(job, timeout=max(seconds, 0.0))
        except queue.Full as error:
            raise TierUnavailable(f"{self.name}: {self._queue.maxsize} calls are waiting already") from error

    def call(self, doing: str, function: Callable[[], T], seconds: float, undo: Callable[[T], None] | None = None) -> T:
        """Return what ``function`` returns, or raise what it raises.

        ``undo`` takes a result that came too late for anybody to want it.

        Raises:
            TierUnavailable: it took longer than ``seconds``, waiting included; ``doing`` says what.
            Closed: the workers have been closed.
        """
        end = monotonic() + seconds
        call = _Call(function, undo)
        self.submit(call.run, seconds)
        if not call.wait(end - monotonic()):
            with self._lock:
                self.late += 1
            raise TierUnavailable(f"{self.name}: {doing}: no answer within {seconds:.1f} s")
        return call.result()

    def close(self, seconds: float) -> bool:
        """End the threads once the queue is empty; return whether all have ended within ``seconds``.

        One that has not is stuck in a call, and ends when that returns.
        """
        end = monotonic() + seconds
        self._closed = True
        for _ in self._threads:
            try:
                self._queue.put(None, timeout=max(end - monotonic(), 0.01))
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(max(end - monotonic(), 0.01))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the thread goes on with the next
                _log.exception("%s: a job failed that nobody waits for", self.name)
            del job  # until the next one comes, nothing of this one is kept alive


class _Call(Generic[T]):
    """One call and whether somebody still waits for it."""

    def __init__(self, function: Callable[[], T], undo: Callable[[T], None] | None) -> None:
        self._function: Callable[[], T] | None = function
        self._undo = undo
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._abandoned = False
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        with self._lock:
            function, self._function = self._function, None
        if function is None:
            return  # nobody waits for it any more, and it has not begun
        try:
            self._value.append(function())
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        with self._lock:
            abandoned = self._abandoned
            self._done.set()
        if abandoned and self._value and self._undo is not None:
            self._undo(self._value[0])

    def wait(self, seconds: float) -> bool:
        """Wait for the end; False when it did not come, and nobody will wait any more."""
        if self._done.wait(max(seconds, 0.0)):
            return True
        with self._lock:
            if self._done.is_set():
                return True
            self._abandoned = True
            self._function = None
            return False

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]

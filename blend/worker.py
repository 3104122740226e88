"""A thread with a bounded queue, and a budget of bytes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Allowance:
    """Bytes that may be taken and must be given back. Thread-safe.

    Args:
        nbytes: how many there are.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.peak = 0
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that are taken now."""
        with self._lock:
            return self._used

    def take(self, nbytes: int) -> bool:
        """Take ``nbytes`` if there are so many; return whether there were."""
        with self._lock:
            if self._used + nbytes > self.nbytes:
                return False
            self._used += nbytes
            self.peak = max(self.peak, self._used)
            return True

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._used -= nbytes


class Worker:
    """One thread that works off jobs in order. It begins with the first job and ends with :meth:`close`.

    A job that raises is logged, and the thread goes on.

    Args:
        name: the thread's name.
        limit: most jobs that may wait.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._queue: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = self._closed = False

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        with self._changed:
            return len(self._queue)

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue a job; return False when the queue is full or closed, or the system starts no thread."""
        with self._changed:
            if self._closed or len(self._queue) >= self._limit:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too many threads, or the interpreter is ending
                    _log.warning("%s: %s", self._name, error)
                    return False
                self._thread = thread
            self._queue.append(job)
            self._changed.notify_all()
            return True

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until every job is done; return whether that is so (``timeout`` in seconds)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._running, timeout)

    def close(self) -> None:
        """Take no more jobs, finish those that are queued, and join the thread. Safe to call again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._running = True
            try:
                job()
            except Exception:  # noqa: BLE001 - whatever one job does, the thread has to go on
                _log.exception("%s: a job failed", self._name)
            finally:
                del job  # with it go its leases and buffers, before anybody hears that it is done
                with self._changed:
                    self._running = False
                    self._changed.notify_all()

"""Work that can wait: it goes in the gaps between requests."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from blend.errors import BlendError, Cancelled, Closed
from blend.serving.job import Job
from blend.serving.steps import Alone, Steps

if TYPE_CHECKING:
    from blend.serving.scheduler import Scheduler

_log = logging.getLogger(__name__)
_Key = TypeVar("_Key", bound=Hashable)

PATIENCE = 10.0
"""Seconds that a piece of background work waits for requests to end before it slips in between two of their steps."""


class Gaps:
    """Jobs for the gaps, whose piece is due first goes first; each of their steps is one piece.

    Belongs to the engine's thread.
    """

    def __init__(self) -> None:
        self._jobs: list[tuple[Job[Any], float]] = []

    def push(self, job: Job[Any], patience: float) -> None:
        """Take a job whose pieces wait so many seconds for a gap at most."""
        if job.advance():
            self._jobs.append((job, patience))
        else:
            job.tell()

    def seconds(self, idle: bool) -> float:
        """Return after how many seconds the next piece is due; infinity without one. ``idle``: there is a gap now."""
        if not self._jobs:
            return math.inf
        job, patience = self._first()
        return 0.0 if idle or job.cancelled else max(0.0, job.ready + patience - perf_counter())

    def work(self, call: Callable[[Job[Any]], BaseException | None]) -> None:
        """Have ``call`` carry out the next piece."""
        first = job, _ = self._first()
        if job.cancelled:
            job.abandon(Cancelled("the work was cancelled"))
        elif job.advance(call(job)):
            return
        self._jobs.remove(first)
        job.tell()

    def _first(self) -> tuple[Job[Any], float]:
        """The job whose piece is due first; one that was cancelled is due at once."""
        return min(self._jobs, key=lambda entry: (not entry[0].cancelled, entry[0].ready + entry[1]))

    def end(self, error: BlendError) -> None:
        """End all of them with this error."""
        for job, _ in self._jobs:
            job.abandon(error)
            job.tell()
        self._jobs.clear()


class Background(Generic[_Key]):
    """Works off a bounded queue in the gaps between requests. Work that does not fit is dropped. Thread-safe.

    The same key is queued once. An error of ``work`` is logged and counted, and the next key is taken.

    Args:
        scheduler: owns the thread.
        work: called in it, for one key at a time.
        limit: most keys that may wait.
    """

    def __init__(self, scheduler: Scheduler, work: Callable[[_Key], None], limit: int = 256) -> None:
        self._scheduler = scheduler
        self._work = work
        self._limit = limit
        self._condition = threading.Condition()
        self._queue: dict[_Key, None] = {}
        self._active = False
        self._closed = False
        self.done = 0
        self.failed = 0
        self.dropped = 0

    def submit(self, key: _Key) -> bool:
        """Queue ``key`` unless it is queued already; returns whether it is queued now."""
        with self._condition:
            if key in self._queue:
                return True
            if self._closed or len(self._queue) >= self._limit:
                self.dropped += 1
                return False
            self._queue[key] = None
            if not self._active:
                try:
                    self._scheduler.submit_background(Job(self._steps()), PATIENCE)
                except Closed:
                    del self._queue[key]
                    self.dropped += 1
                    return False
                self._active = True
            return True

    def discard(self, unwanted: Callable[[_Key], bool]) -> None:
        """Take every queued key that ``unwanted`` is true of out of the queue."""
        with self._condition:
            self._queue = {key: None for key in self._queue if not unwanted(key)}

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is done; returns whether it is (``timeout`` in seconds)."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._active, timeout)

    def close(self) -> None:
        """Drop what is queued, and take no more."""
        with self._condition:
            self._closed = True
            self.dropped += len(self._queue)
            self._queue.clear()

    def _steps(self) -> Steps[None]:
        try:
            while True:
                yield Alone(self._work_off_one)
                with self._condition:
                    if not self._queue:
                        return self._end()
        except GeneratorExit:
            self._end()
            raise

    def _end(self) -> None:
        with self._condition:
            self._active = False
            self._condition.notify_all()

    def _work_off_one(self) -> None:
        """Run the first key. It leaves the queue in the engine's thread: until then it can be discarded."""
        with self._condition:
            key = next(iter(self._queue), None)
            if key is None:
                return
            del self._queue[key]
        try:
            self._work(key)
            self.done += 1
        except Exception:  # noqa: BLE001 - whatever one piece of work does, the thread has to go on
            self.failed += 1
            _log.exception("background work failed")

"""Work that can wait: it goes in the gaps between requests."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from blend.errors import BlendError, Cancelled, Closed, ResourceExhausted
from blend.serving.job import Job
from blend.serving.steps import Alone, Steps

if TYPE_CHECKING:
    from blend.serving.scheduler import Scheduler

_log = logging.getLogger(__name__)
_Key = TypeVar("_Key", bound=Hashable)

PATIENCE = 10.0
"""Seconds that a piece of background work waits for requests to end before it slips in between two of their steps."""


class Gaps:
    """Jobs for the gaps, whose piece is due first goes first: a call, or a slice of a prompt.

    While nobody waits, those without room come before those with it: what was missed speeds up the next requests.

    A job with room takes it when its first piece goes, and ends where there is none: what runs here never makes others
    wait for memory. Belongs to the engine's thread.
    """

    def __init__(self) -> None:
        self._jobs: list[_Waiting] = []

    def push(self, job: Job[Any], patience: float) -> None:
        """Take a job whose pieces wait so many seconds for a gap at most."""
        if job.room is not None or job.advance():
            self._jobs.append(_Waiting(job, patience))
        else:
            job.tell()

    def seconds(self, idle: bool) -> float:
        """Return after how many seconds the next piece is due; infinity without one. ``idle``: there is a gap now."""
        if not self._jobs:
            return math.inf
        first = self._first(idle)
        return 0.0 if idle or first.job.cancelled else max(0.0, first.due - perf_counter())

    def work(self, piece: Callable[[Job[Any]], tuple[bool, BaseException | None]], idle: bool) -> None:
        """Have ``piece`` carry out the next one; it returns whether the job's step is over, and what was raised."""
        first = self._first(idle)
        if first.job.cancelled:
            self._end(first, Cancelled("the work was cancelled"))
        elif not self._begun(first):
            return
        else:
            over, error = piece(first.job)
            if over and not first.job.advance(error):
                self._end(first)

    @property
    def holding(self) -> bool:
        """Whether one of them has its room."""
        return any(one.holds for one in self._jobs)

    def give_way(self) -> bool:
        """End those that have their room, for a request needs the memory; returns whether there were any."""
        holding = [one for one in self._jobs if one.holds]
        for one in holding:
            self._end(one, ResourceExhausted("a request needed the memory"))
        return bool(holding)

    def end(self, error: BlendError) -> None:
        """End all of them with this error."""
        for one in [*self._jobs]:
            self._end(one, error)

    def _first(self, idle: bool) -> _Waiting:
        """The job whose piece is due first; one that was cancelled is due at once."""
        return min(self._jobs, key=lambda one: (not one.job.cancelled, idle and one.job.room is not None, one.due))

    def _begun(self, one: _Waiting) -> bool:
        """Have a job that waits for its room begin; returns whether it has a step now."""
        job = one.job
        if job.room is None or one.holds:
            return True
        try:
            one.holds = job.room.take(last=False)
        except Exception as error:  # noqa: BLE001 - it belongs to the job that room was taken for
            self._end(one, error)
            return False
        if not one.holds:
            self._end(one, ResourceExhausted("there is no memory for work in the background now"))
        elif not job.advance():
            self._end(one)
        return job.step is not None

    def _end(self, one: _Waiting, error: BaseException | None = None) -> None:
        """A job is over, by itself or with an error from here."""
        self._jobs.remove(one)
        if error is not None:
            one.job.abandon(error)
        if one.holds and one.job.room is not None:
            one.job.room.give()
        one.job.tell()


@dataclass(eq=False)
class _Waiting:
    """A job for the gaps, how long its pieces wait for one at most, and whether it has its room."""

    job: Job[Any]
    patience: float
    holds: bool = False

    @property
    def due(self) -> float:
        """When its piece goes whether or not there is a gap, a reading of :func:`time.perf_counter`."""
        return self.job.ready + self.patience


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
        self.joined = 0

    @property
    def waiting(self) -> int:
        """Keys that are queued."""
        with self._condition:
            return len(self._queue)

    def submit(self, key: _Key) -> bool:
        """Queue ``key`` unless it is queued already; returns whether it is queued now."""
        with self._condition:
            if key in self._queue:
                self.joined += 1
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

"""The requests that are here, and how long the engine will have to work until each has its first token."""

from __future__ import annotations

import threading
from collections import defaultdict
from time import monotonic
from typing import Any

from blend.errors import DeadlineExceeded, ResourceExhausted
from blend.serving.job import Job


class Demand:
    """Counts requests from when they come until they are over, and adds up what they were estimated to take.

    Thread-safe.

    Args:
        max_waiting: most requests that wait to begin.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._estimates: dict[Job[Any], float] = {}
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        with self._lock:
            return self._waiting

    @property
    def running(self) -> int:
        """Requests that have begun and are not over."""
        with self._lock:
            return len(self._estimates) - self._waiting

    @property
    def present(self) -> int:
        """Requests that wait or are under way."""
        with self._lock:
            return len(self._estimates)

    def backlog_ms(self) -> float:
        """Return how long it will take until every request here has its first token, as far as that is known."""
        with self._lock:
            return sum(self._estimates.values())

    def until_begun_ms(self, job: Job[Any]) -> float:
        """Return how long others will have the engine before a new job's first token, as far as that is known.

        Tenants have equal shares: until this one's work is done, each other has as much, or all that it wants.
        """
        with self._lock:
            work = defaultdict[str, float](float)
            for other, estimate_ms in self._estimates.items():
                work[other.tenant] += estimate_ms
        before = work.pop(job.tenant, 0.0)
        return before + sum(min(theirs, before + job.estimate_ms) for theirs in work.values())

    def enter(self, job: Job[Any]) -> None:
        """A request comes, and waits to begin.

        Raises:
            ResourceExhausted: too many wait already.
        """
        with self._lock:
            if self._waiting >= self._max_waiting:
                backlog_ms = sum(self._estimates.values())
                raise ResourceExhausted(
                    f"{self._max_waiting} requests wait for the engine already", backlog_ms / 1e3 or None
                )
            self._waiting += 1
            self._estimates[job] = job.estimate_ms

    def leave_queue(self) -> None:
        """One of those that wait does not any more: it begins, or is over."""
        with self._lock:
            self._waiting -= 1

    def first_token(self, job: Job[Any]) -> None:
        """A job has its first token."""
        with self._lock:
            if job in self._estimates:
                self._estimates[job] = 0.0

    def leave(self, job: Job[Any]) -> None:
        """A job is over."""
        with self._lock:
            self._estimates.pop(job, None)

    def clear(self) -> None:
        """All are over."""
        with self._lock:
            self._estimates.clear()
            self._waiting = 0


def check_deadline(job: Job[Any], backlog_ms: float) -> None:
    """Refuse a job that others keep so long from the engine that its deadline would pass before its first token.

    Raises:
        DeadlineExceeded: it would.
    """
    if job.deadline is None:
        return
    left_ms, needed_ms = (job.deadline - monotonic()) * 1e3, backlog_ms + job.estimate_ms
    if left_ms <= needed_ms:
        raise DeadlineExceeded(
            f"the first token would take about {needed_ms:.0f} ms, and {max(0.0, left_ms):.0f} ms are left"
        )

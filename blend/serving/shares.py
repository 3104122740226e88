"""Equal shares of the engine for all tenants that want some."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blend.serving.job import Job


class Shares:
    """Who has had least comes first (deficit round robin over rows; Shreedhar and Varghese, SIGCOMM 1995).

    A tenant that comes back is treated as the one present that has had least: what it left unused is not saved up.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._jobs: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """One of the tenant's jobs has arrived."""
        if not self._jobs[tenant]:
            self._had[tenant] = min(self._had.values(), default=0.0)
        self._jobs[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One of its jobs has ended."""
        self._jobs[tenant] -= 1
        if not self._jobs[tenant]:
            del self._jobs[tenant], self._had[tenant]

    def charge(self, tenant: str, rows: float) -> None:
        """Take note of rows that were computed for a tenant with a job here."""
        self._had[tenant] += rows

    def had(self, tenant: str) -> float:
        """How many rows a tenant has had; comparable with others' alone."""
        return self._had[tenant]

    def order(self, jobs: Iterable[Job[Any]]) -> list[Job[Any]]:
        """Return jobs in the order in which they are served: of the tenant that had least first, oldest first."""
        first: dict[str, int] = {}
        ordered = sorted(jobs, key=lambda job: job.order)
        for job in ordered:
            first.setdefault(job.tenant, job.order)
        return sorted(ordered, key=lambda job: (self._had[job.tenant], first[job.tenant]))


class Waiting:
    """Jobs that have not begun, each tenant's in order of arrival."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._queues: dict[str, deque[Job[Any]]] = {}

    def __iter__(self) -> Iterator[Job[Any]]:
        return (job for queue in self._queues.values() for job in queue)

    def push(self, job: Job[Any]) -> None:
        """Put a job behind its tenant's others."""
        self._queues.setdefault(job.tenant, deque()).append(job)

    def first(self, running: Sequence[Job[Any]]) -> Job[Any] | None:
        """Return the job that is to begin next: of the tenant with the fewest running, then with the least had."""
        counts = Counter(job.tenant for job in running)
        tenant = min(self._queues, key=lambda name: (counts[name], self._shares.had(name)), default=None)
        return None if tenant is None else self._queues[tenant][0]

    def remove(self, job: Job[Any]) -> None:
        """Take a job out."""
        queue = self._queues[job.tenant]
        queue.remove(job)
        if not queue:
            del self._queues[job.tenant]

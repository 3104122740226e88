"""Chunks that requests missed: each is computed once, later, unless it was forgotten meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from math import inf
from time import perf_counter

from blend.pipeline import Request
from blend.serving.background import Background
from blend.serving.scheduler import Scheduler
from blend.types import Chunk, Report

_LIMIT = 100_000


class Misses:
    """One context-free precompute for every chunk that the store could not give, and that is still wanted.

    They are computed in the gaps between requests. Thread-safe.

    Args:
        scheduler: owns the engine's thread.
        key: returns a chunk's content key in a namespace.
        compute: encodes a chunk in a namespace and stores it; called in the engine's thread.
    """

    def __init__(
        self, scheduler: Scheduler, key: Callable[[Chunk, str], str], compute: Callable[[Chunk, str], object]
    ) -> None:
        self._key = key
        self._compute = compute
        self._lock = threading.Lock()
        # When a chunk was forgotten, or its namespace dropped: a request that came before must not have it computed
        # again.
        self._forgotten: dict[str, float] = {}
        self._dropped: dict[str, float] = {}
        self._later = Background(scheduler, self._work)

    def queue(self, request: Request, report: Report) -> None:
        """Queue what a request missed, but for what was forgotten, or dropped, since it arrived."""
        chunks = [part.chunk for _, part in request.prompt.parts()]
        for chunk, seen in zip(chunks, report.chunks, strict=True):
            if seen.outcome not in ("miss", "failed"):
                continue
            with self._lock:  # nothing is forgotten between looking and queueing
                unwanted = max(self._forgotten.get(seen.key, -inf), self._dropped.get(request.namespace, -inf))
                if unwanted < request.arrived:
                    self._later.submit((chunk, request.namespace))

    def want(self, key: str) -> None:
        """Take note that a chunk which may have been forgotten is stored again."""
        with self._lock:
            self._forgotten.pop(key, None)

    def forget(self, keys: Collection[str]) -> None:
        """Do not compute these chunks, by content key, for any request that has arrived by now."""
        with self._lock:
            _note(self._forgotten, keys)
            self._later.discard(lambda missed: self._key(*missed) in keys)

    def forgotten(self, keys: Iterable[str], namespace: str, since: float) -> bool:
        """Return whether a chunk of these content keys was forgotten, or the namespace dropped, since a moment.

        Args:
            since: a reading of :func:`time.perf_counter`.
        """
        with self._lock:
            last = max((self._forgotten.get(key, -inf) for key in keys), default=-inf)
            return max(last, self._dropped.get(namespace, -inf)) >= since

    def drop(self, namespace: str) -> None:
        """Do not compute any chunk of a namespace for a request that has arrived by now."""
        with self._lock:
            _note(self._dropped, [namespace])
            self._later.discard(lambda missed: missed[1] == namespace)

    def counts(self) -> dict[str, int]:
        """Return how many chunks were computed, failed, did not fit into the queue, were queued already, and wait."""
        return {name: getattr(self._later, name) for name in ("done", "failed", "dropped", "joined", "waiting")}

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to compute (``timeout`` in seconds); returns whether that is so."""
        return self._later.wait_idle(timeout)

    def close(self) -> None:
        """Drop what is queued, and take no more."""
        self._later.close()

    def _work(self, missed: tuple[Chunk, str]) -> None:
        self._compute(*missed)


def _note(times: dict[str, float], names: Iterable[str]) -> None:
    """Put names down as of now, the latest last; the oldest go beyond the limit."""
    now = perf_counter()
    for name in names:
        times.pop(name, None)
        times[name] = now
    while len(times) > _LIMIT:
        del times[next(iter(times))]

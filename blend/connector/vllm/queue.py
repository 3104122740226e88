"""Requests on their way to be blended, one at a time and step by step, and missing chunks to be encoded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from math import inf
from time import perf_counter

from blend.chunks import ChunkCache
from blend.connector.vllm.blending import Blender
from blend.connector.vllm.jobs import Job, Outcomes, Report
from blend.connector.vllm.tasks import Pace, Task
from blend.filling import Filling
from blend.store import Stored
from blend.types import Chunk

_log = logging.getLogger(__name__)

_AHEAD = 2
"""Requests whose chunks are asked of the store: the one whose turn it is, and the next."""


class _Entry:
    """A request from its arrival in the worker to its end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.arrived = perf_counter()
        self.begun = self.arrived
        self.filling: Future[Filling] | None = None
        self.task: Task | None = None

    def forget(self) -> None:
        """Give up what has been done for it, and what is under way."""
        if self.task is not None:
            self.task.end()
        elif self.filling is not None and not self.filling.cancel():
            self.filling.add_done_callback(_close)


class Queue:
    """Blends requests one after another, in the order of their arrival, and encodes missing chunks when there are none.

    Where ranks share the model's heads, each has a queue; all of them do the same work and stop at the same places.
    All methods belong to the engine's thread; only chunks are waited for in another one.

    Args:
        blender: fills requests' blocks.
        chunks: the store's.
        capture: most missing chunks that wait to be encoded; 0 has none encoded.
    """

    def __init__(self, blender: Blender, chunks: ChunkCache, capture: int) -> None:
        self._blender = blender
        self._chunks = chunks
        self._capture = capture
        self._shards = chunks.decoder.shards
        self._pace = Pace(self._shards)
        self._entries: deque[_Entry] = deque()
        self._missed: dict[tuple[Chunk, str], None] = {}
        self._encoding: Task | None = None
        self._finder = ThreadPoolExecutor(1, thread_name_prefix="blend-finding")
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._refused: set[str] = set()
        self._reports: dict[str, Report] = {}
        self._encoded = 0

    @property
    def open(self) -> int:
        """Requests that are under way."""
        return len(self._entries)

    @property
    def capturing(self) -> bool:
        """Whether missing chunks wait to be encoded."""
        return bool(self._missed) or self._encoding is not None

    def add(self, jobs: Iterable[Job]) -> None:
        """Take requests."""
        self._entries.extend(map(_Entry, jobs))

    def refuse(self, request_ids: Collection[str]) -> None:
        """Say of requests that their blocks are not filled."""
        self._refused.update(request_ids)

    def drop(self, request_ids: Collection[str]) -> None:
        """Give up those of these requests that are under way: they have ended otherwise."""
        for entry in [e for e in self._entries if e.job.request_id in request_ids]:
            self._entries.remove(entry)
            entry.forget()
            self._ended.add(entry.job.request_id)

    def run(self, seconds: float, idle: bool) -> None:
        """Work for about so long.

        Args:
            seconds: what this step has for it.
            idle: whether the engine has nothing else to do. Only then is the store waited for, and are chunks encoded.
        """
        end = perf_counter() + seconds
        while True:  # once at least: however short a step's share is, work goes on
            left = end - perf_counter()
            for entry in list(self._entries)[:_AHEAD]:
                if entry.filling is None:
                    entry.filling = self._finder.submit(self._blender.find, entry.job)
            going = self._go_on(self._entries[0], left, idle) if self._entries else idle and self._encode(left)
            if not going or self._pace.over(end):
                return

    def _go_on(self, entry: _Entry, left: float, idle: bool) -> bool:
        """Go on with the first request; returns whether there was anything to do but to wait for the store."""
        assert entry.filling is not None
        if entry.task is None:
            if idle:
                wait([entry.filling], left)
            if not all(self._shards.everywhere([entry.filling.done()])):
                return False
            entry.begun = perf_counter()
            entry.task = Task(partial(self._work, entry), self._pace)
        if entry.task.go_on(left):
            self._entries.popleft()
            self._ended.add(entry.job.request_id)
        return True

    def _work(self, entry: _Entry) -> None:
        """Fill a request's blocks, at full prefill where blending fails; what fails even so is said."""
        job = entry.job
        assert entry.filling is not None and entry.task is not None
        try:
            report, missed = self._blender.run(job, entry.filling.result)
        except Exception as error:  # noqa: BLE001 - the engine outlives it, and its request is computed
            _log.warning("request %s runs at full prefill, for blending failed", job.request_id, exc_info=error)
            self._compute(entry, f"blending failed: {error}")
            return
        self._reports[job.request_id] = report.timed(entry.begun - entry.arrived, entry.task.paused)
        for chunk in missed:
            if len(self._missed) < self._capture:
                self._missed[chunk, job.request.tenant] = None

    def _compute(self, entry: _Entry, reason: str) -> None:
        name = entry.job.request_id
        try:
            report = self._blender.compute(entry.job, reason)
        except Exception as error:  # noqa: BLE001 - the engine outlives it
            _log.warning("the blocks of request %s could not be filled", name, exc_info=error)
            self._failed.add(name)
            return
        assert entry.task is not None
        self._reports[name] = report.timed(entry.begun - entry.arrived, entry.task.paused)

    def encode(self, chunk: Chunk, tenant: str) -> tuple[Stored | None, bool]:
        """Encode a chunk now, whole; returns what :meth:`blend.chunks.ChunkCache.encode` does, and raises the same."""
        self._finish_encoding()
        self._missed.pop((chunk, tenant), None)
        return self._chunks.encode(chunk, tenant)

    def forget(self, keys: Collection[str]) -> None:
        """Do not encode chunks of these content keys for requests that have been blended."""
        self._finish_encoding()  # or it would be stored behind this call
        for chunk, tenant in tuple(self._missed):
            if self._chunks.key(chunk, tenant) in keys:
                del self._missed[chunk, tenant]

    def _finish_encoding(self) -> None:
        if self._encoding is not None:
            self._encoding.go_on(inf)
            self._encoding = None

    def _encode(self, seconds: float) -> bool:
        """Go on encoding missing chunks; returns whether there were any."""
        if self._encoding is None:
            if not self._missed:
                return False
            chunk, tenant = next(iter(self._missed))
            del self._missed[chunk, tenant]
            self._encoding = Task(partial(self._put, chunk, tenant), self._pace)
        if self._encoding.go_on(seconds):
            self._encoding = None
            self._encoded += 1
        return True

    def _put(self, chunk: Chunk, tenant: str) -> None:
        try:
            self._chunks.encode(chunk, tenant)
        except Exception as error:  # noqa: BLE001 - a chunk that is not stored is computed
            _log.warning("a missing chunk of %d tokens could not be encoded: %s", len(chunk), error)

    def take(self) -> Outcomes:
        """Return what became of requests since the last call."""
        found = Outcomes(
            ended=frozenset(self._ended | self._refused),
            failed=frozenset(self._failed),
            refused=frozenset(self._refused),
            reports=tuple(self._reports.items()),
            encoded=self._encoded,
        )
        self._ended, self._failed, self._refused, self._reports, self._encoded = set(), set(), set(), {}, 0
        return found

    def restart(self) -> None:
        """Have what is under way begin anew, with what the store gives then; missing chunks are forgotten."""
        for entry in self._entries:
            entry.forget()
            entry.filling = entry.task = None
        self._end_encoding()
        self._missed.clear()

    def close(self) -> frozenset[str]:
        """Give everything up; returns the requests that were under way. Safe to call again."""
        abandoned = frozenset(entry.job.request_id for entry in self._entries)
        for entry in self._entries:
            entry.forget()
        self._entries.clear()
        self._end_encoding()
        self._finder.shutdown()
        return abandoned

    def _end_encoding(self) -> None:
        if self._encoding is not None:
            self._encoding.end()
            self._encoding = None


def _close(found: Future[Filling]) -> None:
    if not found.cancelled() and found.exception() is None:
        found.result().close()

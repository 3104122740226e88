"""Chunks are encoded behind their nearest neighbours in the background, while callers go first.

A chunk's stored KV does not know of the passages that it will stand behind. Encoded behind a few related passages,
which are then dropped, it comes closer to what a prompt would make of it, and nothing is recomputed for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import Closed
from blend.rag.neighbours import Neighbourhood
from blend_server.conditioned import Conditioned, chunk_of
from blend_server.engines import ConditioningEngine, ServedEngine
from blend_server.interceptors import status_of

if TYPE_CHECKING:
    from blend_server.tenants import Tenant

logger = logging.getLogger("blend_server")

# For how long no document has come or gone before chunks are encoded: more of them may be on their way.
_QUIET_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_MOST_RETRY_SECONDS = 600.0


class Counts(NamedTuple):
    """Chunks of a tenant that are stored behind neighbours, and that wait for it."""

    conditioned: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class ConditioningStats:
    """Figures since the start.

    ``tenants``: those that are open. ``done`` and ``failed`` count chunks, ``seconds`` is what encoding them took,
    with the gaps between requests that it waited for.
    """

    tenants: Mapping[str, Counts] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class _Work:
    """An open tenant. ``due``: when it is looked at again, by the loop's clock; ``None``: once something changes."""

    tenant: Tenant
    chunks: Conditioned
    retry_seconds: float
    due: float | None = None
    changed: bool = True
    encoded: int = 0


class Conditioning:
    """Encodes the chunks of all open tenants behind their neighbours, one after another, the tenants in turns.

    Nothing is written down of how far it came: the store tells what is there. Belongs to the event loop's thread, but
    for :meth:`stats`.

    Args:
        engine: encodes; with one that cannot encode behind others, nothing happens.
        neighbours: of each chunk; 0: nothing happens.
    """

    def __init__(self, engine: ServedEngine, neighbours: int) -> None:
        self._engine = engine if isinstance(engine, ConditioningEngine) and neighbours else None
        self._neighbours = neighbours
        self._works: dict[str, _Work] = {}
        self._woken = asyncio.Event()
        self._stats = ConditioningStats()
        if neighbours and self._engine is None:
            logger.warning("event=neighbours_ignored neighbours=%d reason=engine", neighbours)

    def stats(self) -> ConditioningStats | None:
        """Return figures; ``None`` where nothing is encoded behind neighbours. May be called from any thread."""
        return self._stats if self._engine is not None else None

    def counts(self, name: str) -> Counts:
        """Return a tenant's figures."""
        return self._stats.tenants.get(name, Counts())

    def opened(self, tenant: Tenant) -> None:
        """Look at all chunks of a tenant."""
        if self._engine is not None:
            chunks = Conditioned(tenant.library, self._engine, self._neighbours)
            self._works[tenant.name] = _Work(tenant, chunks, _RETRY_SECONDS)
            self.changed(tenant.name)

    def changed(self, name: str) -> None:
        """Look at a tenant's chunks again, for documents came or went."""
        if (work := self._works.get(name)) is not None:
            work.changed = True
            # Where it failed before, that has to wait all the same.
            work.due = max(work.due or 0.0, self._now() + _QUIET_SECONDS)
            self._woken.set()

    def closed(self, name: str) -> None:
        """Leave a tenant that is being closed as it is; the next time it is opened, this goes on."""
        if self._works.pop(name, None) is not None:
            others = {key: counts for key, counts in self._stats.tenants.items() if key != name}
            self._stats = replace(self._stats, tenants=others)

    async def run(self) -> None:
        """Work until cancelled. What ends this before its time is logged: nobody waits for it."""
        try:
            while True:
                await self._turn(await self._next())
        except Exception:  # calls are served all the same
            logger.exception("event=conditioning_ended")

    async def _next(self) -> _Work:
        """The tenant whose turn it is, once there is one."""
        while True:
            waiting = [(work.due, name) for name, work in self._works.items() if work.due is not None]
            due, name = min(waiting, default=(None, ""))
            left = None if due is None else due - self._now()
            if left is not None and left <= 0:
                return self._works[name]
            self._woken.clear()
            timer = None if left is None else asyncio.get_running_loop().call_later(left, self._woken.set)
            try:
                await self._woken.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _turn(self, work: _Work) -> None:
        due, name = work.due, work.tenant.name
        try:
            more = await self._step(work)
        except Exception as error:  # noqa: BLE001 - one chunk or tenant must not keep the others from being encoded
            if self._works.get(name) is not work:
                return  # it was closed, and nothing is wrong with it
            code, seconds = status_of(error).code.name, work.retry_seconds
            logger.warning("event=conditioning_postponed tenant=%s code=%s retry_seconds=%g", name, code, seconds)
            work.due = self._now() + seconds
            work.retry_seconds = min(2 * seconds, _MOST_RETRY_SECONDS)
        else:
            if work.due == due:  # else documents have come or gone meanwhile
                work.due = self._now() if more else None
        if self._works.get(name) is work:
            counts = Counts(work.chunks.conditioned, work.chunks.waiting)
            self._stats = replace(self._stats, tenants={**self._stats.tenants, name: counts})

    async def _step(self, work: _Work) -> bool:
        """Do one piece of a tenant's work; returns whether there may be more."""
        chunks, tenant = work.chunks, work.tenant
        if work.changed:
            await self._follow(work)
        elif (one := chunks.next) is not None:
            await self._encode(work, one)
        elif chunks.waiting:
            await tenant.ingestion.give_way()
            await tenant.threads.call(chunks.look)
        else:
            if work.encoded:
                counts = (work.encoded, chunks.conditioned)
                logger.info("event=conditioned tenant=%s encoded=%d conditioned=%d", tenant.name, *counts)
            work.encoded, work.retry_seconds = 0, _RETRY_SECONDS
            return False
        return True

    async def _follow(self, work: _Work) -> None:
        await work.tenant.ingestion.give_way()
        work.changed = False
        try:
            await work.tenant.threads.call(work.chunks.follow)
        except BaseException:
            work.changed = True
            raise

    async def _encode(self, work: _Work, one: Neighbourhood) -> None:
        keys = (one.chunk.content_key, *(other.content_key for other in one.neighbours))
        try:
            seconds = await work.tenant.ingestion.in_idle_time(keys, partial(self._precompute, work.tenant.name, one))
        except Closed:
            raise
        except Exception:
            work.chunks.postpone(one)
            self._stats = replace(self._stats, failed=self._stats.failed + 1)
            raise
        work.chunks.settle(one, seconds is not None)
        if seconds is None:  # one of them has gone, which the library knows by now
            work.changed = True
            return
        self._stats = replace(self._stats, done=self._stats.done + 1, seconds=self._stats.seconds + seconds)
        work.encoded += 1
        work.retry_seconds = _RETRY_SECONDS

    def _precompute(self, name: str, one: Neighbourhood) -> float:
        """Encode a chunk behind its neighbours, in the worker's thread; returns how many seconds that took."""
        assert self._engine is not None
        begin = perf_counter()
        behind = [[chunk_of(other) for other in one.neighbours]]
        self._engine.precompute([chunk_of(one.chunk)], behind, namespace=name)
        return perf_counter() - begin

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

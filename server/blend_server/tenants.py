"""Tenants: each has documents, an index and ingestions of its own; opened when they are asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from blend.config import RagConfig
from blend.errors import ResourceExhausted
from blend.rag.library import Library
from blend.rag.protocols import Embedder
from blend_server.auth import DEFAULT_TENANT, Gate
from blend_server.conditioning import Conditioning
from blend_server.engines import ServedEngine
from blend_server.ingestion import Ingestion
from blend_server.places import RETRY_SECONDS
from blend_server.reindexing import Reindexing
from blend_server.threads import Share, Threads
from blend_server.tokens import NAME
from blend_server.worker import Worker


class Tenant:
    """An open tenant.

    ``threads`` run its library. ``answered`` counts its answers since it was opened, ``users`` the calls that use it.
    """

    def __init__(self, library: Library, threads: Share, ingestion: Ingestion) -> None:
        self.name = library.namespace
        self.library = library
        self.threads = threads
        self.ingestion = ingestion
        self.answered = 0
        self.users = 0

    @property
    def idle(self) -> bool:
        """Whether nothing needs it to be open."""
        return self.users == 0 and self.ingestion.idle


class Tenants:
    """The tenants of a data directory. All methods belong to the event loop's thread.

    The tenant ``default`` has the directory ``library``, every other one ``tenants/NAME``. A tenant's name is the
    engine's namespace, so that nothing of what is stored for one tenant is ever found by another.

    Args:
        directory: the service's data directory.
        config: how documents are processed.
        engine, worker: compute and hold KV.
        threads: open, use and close libraries.
        embedder: the embedding model, shared.
        gate: knows what each tenant may have.
        most_open: tenants that are kept open; beyond them idle ones are closed, the least recently used first.
    """

    def __init__(
        self,
        directory: Path,
        config: RagConfig,
        engine: ServedEngine,
        worker: Worker,
        threads: Threads,
        embedder: Embedder,
        gate: Gate,
        most_open: int,
    ) -> None:
        self._directory = directory
        self._config = config
        self._engine = engine
        self._worker = worker
        self._threads = threads
        self._embedder = embedder
        self._gate = gate
        self._most_open = most_open
        self._open: OrderedDict[str, Tenant] = OrderedDict()
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Tenant]] = set()
        self._background: asyncio.Task[None] | None = None
        self.conditioning = Conditioning(engine, config.neighbours)
        """Encodes open tenants' chunks behind their neighbours, once documents are up to date."""

    @property
    def opened(self) -> int:
        """How many are open."""
        return len(self._open)

    async def start(self) -> None:
        """Open the tenant ``default``.

        In the background all tenants are opened, which has the KV that an earlier run left behind forgotten, and their
        documents are brought up to date with the present settings; then chunks are encoded behind their neighbours.

        Raises:
            StoreError: the default tenant's documents cannot be used.
        """
        async with self.use(DEFAULT_TENANT):
            pass
        names = await self._threads.call(self._stored)
        self._background = asyncio.ensure_future(self._work((DEFAULT_TENANT, *names)))

    async def _work(self, names: Sequence[str]) -> None:
        """What goes on in idle time until it is cancelled."""
        await Reindexing(self.use, self._engine).run(names)
        await self.conditioning.run()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncGenerator[Tenant, None]:
        """A tenant, open inside the ``with`` block. One that is new has no documents.

        Raises:
            ResourceExhausted: as many tenants as may be are open, and none of them is idle.
            StoreError: its documents cannot be used.
        """
        # It may be closed between being opened and being used, for that takes a turn of the loop.
        while (tenant := self._open.get(name)) is None:
            task = asyncio.ensure_future(self._opened(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.shield(task)  # what was begun is not left half open when this call is cancelled
        self._open.move_to_end(name)
        tenant.users += 1
        try:
            yield tenant
        finally:
            tenant.users -= 1

    async def finish(self) -> None:
        """Finish what must not be left half done."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait([self._background])
        if self._tasks:
            await asyncio.wait(self._tasks)
        for tenant in list(self._open.values()):  # idle ones may be closed meanwhile
            await tenant.ingestion.close()

    def close(self) -> None:
        """Close all, once the threads have ended."""
        while self._open:
            self._open.popitem()[1].library.close()

    # ---------------------------------------------------------------------------------------------- opening

    async def _opened(self, name: str) -> Tenant:
        async with self._opening:
            if (tenant := self._open.get(name)) is not None:
                return tenant
            await self._make_room()
            library = await self._threads.call(self._library, name)
            # With several tenants one thread is always left by each, for whoever comes beside a flood.
            threads = Share(self._threads, max(1, self._threads.count - self._gate.many))
            changed = partial(self.conditioning.changed, name)
            ingestion = Ingestion(self._engine, library, self._worker, threads, self._gate, changed)
            tenant = Tenant(library, threads, ingestion)
            self._open[name] = tenant
            self.conditioning.opened(tenant)
            tenant.ingestion.sweep_soon()
            return tenant

    async def _make_room(self) -> None:
        while len(self._open) >= self._most_open:
            idle = next((tenant for tenant in self._open.values() if tenant.idle), None)
            if idle is None:
                raise ResourceExhausted(
                    f"{len(self._open)} tenants are being served, which is the most at once; try again later",
                    RETRY_SECONDS,
                )
            del self._open[idle.name]
            self.conditioning.closed(idle.name)
            await idle.ingestion.close()
            await self._threads.call(idle.library.close)

    def _library(self, name: str) -> Library:
        return Library(self._place(name), self._config, self._engine.tokenizer, self._embedder, name)

    def _place(self, name: str) -> Path:
        if name == DEFAULT_TENANT:
            return self._directory / "library"
        return self._directory / "tenants" / name

    def _stored(self) -> list[str]:
        """The tenants, beside the default one, that have had documents."""
        try:
            return sorted(path.name for path in (self._directory / "tenants").iterdir() if NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []

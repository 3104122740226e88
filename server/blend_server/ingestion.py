"""Documents in and out, with the stored KV that follows them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from blend.errors import Closed, NotFound, ResourceExhausted
from blend.rag.library import Library, Prepared
from blend.rag.records import Orphan
from blend.types import Chunk
from blend_server import audit, convert
from blend_server.auth import Gate
from blend_server.engines import ServedEngine
from blend_server.interceptors import status_of
from blend_server.operations.context import request_id
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.threads import Share
from blend_server.worker import Worker

logger = logging.getLogger("blend_server")

T = TypeVar("T")

# Chunks in one turn of the worker's thread, which all tenants wait for.
_FORGET_AT_ONCE = 32
_RETRY_SECONDS = 1.0
_MOST_RETRY_SECONDS = 60.0

# For how long each chunk of a document that nobody waits for lets callers go first; for how long what is of use without
# it does; and how often it looks.
_GIVE_WAY_SECONDS = 2.0
_IDLE_SECONDS = 30.0
_LOOK_SECONDS = 0.02


class Ingestion:
    """Takes one tenant's documents in and out. All methods belong to the event loop's thread.

    KV is computed and forgotten by the worker's one thread, in order. What is to be forgotten stands in the catalog
    first, so that it goes whatever ends between: see :meth:`sweep`.

    Args:
        engine, library: where KV and documents go.
        worker: runs the engine.
        threads: run the library.
        gate: knows how many documents the tenant may have.
        changed: called once documents have come or gone.
    """

    def __init__(
        self,
        engine: ServedEngine,
        library: Library,
        worker: Worker,
        threads: Share,
        gate: Gate,
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._namespace = library.namespace
        self._gate = gate
        self._changed = changed
        self._room_lock = asyncio.Lock()
        self._reserved: list[int] = []
        self._library = library
        self._worker = worker
        self._threads = threads
        self._being_ingested: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeping = asyncio.Lock()
        self._sweep_due = False
        self._retry: asyncio.TimerHandle | None = None
        self._retry_seconds = _RETRY_SECONDS
        self._renewal = asyncio.Lock()
        self._closing = False

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, nor to be tried again. What goes on in idle time may be broken off."""
        return not self._tasks and self._retry is None

    async def close(self) -> None:
        """Finish what must not be left half done."""
        self._closing = True
        async with self._renewal:
            pass
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    # ------------------------------------------------------------------------------------------- documents

    async def ingest(self, document: pb.Document) -> AsyncGenerator[pb.IngestProgress, None]:
        """One document's progress; what goes wrong with it is its last stage."""
        try:
            async with aclosing(self._stages(document)) as stages:
                async for stage in stages:
                    yield stage
        except Closed:
            raise
        except Exception as error:  # noqa: BLE001 - one document must not end the stream
            status = status_of(error)
            logger.info("event=refused_document request_id=%s code=%s", request_id.get(), status.code.name)
            audit.current.get().write(status.code.name, document.id)
            yield pb.IngestProgress(failed=pb.IngestProgress.Failed(code=status.code.name, message=status.message))

    async def delete(self, document_id: str) -> int:
        """Delete a document; returns how many chunks went with it.

        Raises:
            NotFound: there is no such document.
        """
        return await self._to_the_end(self._delete(document_id))

    async def renew(self, document_id: str) -> None:
        """Process a stored document as it would be now, while callers go first; one that is gone is passed over.

        The stored one answers, or is left out of answers, as before, until the new one takes its place.

        Raises:
            Closed: this was closed meanwhile; the document is as it was.
            InvalidDocument: it would not be taken with the present settings.
            ModelError, ResourceExhausted, StoreError: it cannot be processed now.
        """
        async with self._renewal:
            prepared = await self._threads.call(self._library.prepare_again, document_id)
            if prepared is None:
                return
            await self.give_way(_GIVE_WAY_SECONDS)
            prepared = await self._threads.call(self._library.embed, prepared, self._check_open)
            keys = await self._threads.call(self._keys, prepared.chunks)
            async with AsyncExitStack() as held:
                held.enter_context(self._kept(keys))
                missing = await self._worker.call(
                    partial(self._engine.missing, prepared.chunks, namespace=self._namespace)
                )
                if missing:
                    await self._threads.call(self._library.announce, prepared, keys)
                for chunk in missing:
                    await self.give_way(_GIVE_WAY_SECONDS)
                    await self._worker.call(self._precompute, chunk)
                await self._to_the_end(self._commit(prepared, keys, held.pop_all()))

    async def in_idle_time(self, keys: Iterable[str], work: Callable[[], T]) -> T | None:
        """Have the engine do what needs the chunks of these content keys, while callers go first.

        Returns what came of it; ``None`` where no document holds one of them any more, and nothing was done. One that
        goes from then on is forgotten behind this call, in the same thread.

        Raises:
            Closed: this was closed meanwhile.
        """
        wanted = tuple(keys)

        def done() -> T | None:
            return work() if all(map(self._library.references, wanted)) else None

        async with self._renewal:
            await self.give_way()
            return await self._worker.call(done)

    async def give_way(self, seconds: float = _IDLE_SECONDS) -> None:
        """Let callers go first, within bounds: under a load that never ends documents have to be renewed, too.

        Raises:
            Closed: this is being closed.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._worker.requests and loop.time() < end and not self._closing:
            await asyncio.sleep(_LOOK_SECONDS)
        self._check_open()

    def _check_open(self, *progress: int) -> None:
        if self._closing:
            raise Closed("the tenant is being closed")

    async def _stages(self, document: pb.Document) -> AsyncGenerator[pb.IngestProgress, None]:
        library, call = self._library, self._threads.call
        title = convert.title(document.title)
        prepared = await call(library.prepare, document.id, title, document.content)
        chunks = prepared.chunks
        if not prepared.unchanged:
            tokens = sum(len(chunk) for chunk in chunks)
            yield pb.IngestProgress(chunked=pb.IngestProgress.Chunked(chunks=len(chunks), tokens=tokens))
            prepared = await call(library.embed, prepared)
            yield pb.IngestProgress(embedded=pb.IngestProgress.Embedded(chunks=len(chunks)))
        keys = await call(self._keys, chunks)
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._room(prepared))
            held.enter_context(self._kept(keys))
            missing = await self._worker.call(partial(self._engine.missing, chunks, namespace=self._namespace))
            if missing:
                await call(library.announce, prepared, keys)
            reused = len(chunks)
            if missing or not prepared.unchanged:
                async with aclosing(self._compute(missing, len(chunks))) as stages:
                    async for stage in stages:
                        reused = stage.computed.reused
                        yield stage
            # What is held goes to it: the request that began this may be gone before it is done.
            dropped = await self._to_the_end(self._commit(prepared, keys, held.pop_all()))
        counts = {"chunks": len(chunks), "computed_chunks": len(chunks) - reused, "reused_chunks": reused}
        if prepared.unchanged:
            yield pb.IngestProgress(unchanged=pb.IngestProgress.Unchanged(**counts))
        else:
            yield pb.IngestProgress(stored=pb.IngestProgress.Stored(**counts, dropped_chunks=dropped))

    async def _compute(self, missing: list[Chunk], total: int) -> AsyncGenerator[pb.IngestProgress, None]:
        done = reused = total - len(missing)
        for chunk in (None, *missing):
            if chunk is not None:
                reused += not await self._worker.call(self._precompute, chunk)
                done += 1
            yield pb.IngestProgress(computed=pb.IngestProgress.Computed(done=done, total=total, reused=reused))

    def _precompute(self, chunk: Chunk) -> bool:
        """Return whether a chunk had to be computed: an equal one, or another client, may have been first."""
        wanted = bool(self._engine.missing([chunk], namespace=self._namespace))
        self._engine.precompute([chunk], namespace=self._namespace)
        return wanted

    def _keys(self, chunks: Iterable[Chunk]) -> list[str]:
        return [self._engine.content_key(chunk, namespace=self._namespace) for chunk in chunks]

    @asynccontextmanager
    async def _room(self, prepared: Prepared) -> AsyncGenerator[None, None]:
        """Room for a document in the tenant's quotas, kept while it is being ingested.

        Raises:
            ResourceExhausted: a quota leaves none.
        """
        quotas = self._gate.quotas(self._namespace)
        if prepared.unchanged or (quotas.documents is None and quotas.nbytes is None):
            yield
            return
        nbytes = len(prepared.document.text.encode())
        async with self._room_lock:
            documents, stored = await self._threads.call(self._library.size, prepared.document.id)
            documents, stored = documents + len(self._reserved), stored + sum(self._reserved)
            for name, used, more, quota in (
                ("documents", documents, 1, quotas.documents),
                ("bytes", stored, nbytes, quotas.nbytes),
            ):
                if quota is not None and used + more > quota:
                    raise ResourceExhausted(
                        f"quota {name}: tenant {self._namespace!r} has {used} beside this document, which needs {more} "
                        f"more, and may have {quota}; delete documents first"
                    )
            self._reserved.append(nbytes)
        try:
            yield
        finally:
            self._reserved.remove(nbytes)

    @contextmanager
    def _kept(self, keys: list[str]) -> Iterator[None]:
        """Keep the KV of a document that is being ingested from going with the last other document that has it."""
        self._being_ingested.update(keys)
        try:
            yield
        finally:
            self._being_ingested -= Counter(keys)
            # If it was not committed, its KV is of no use; if another document went meanwhile, that one's is not.
            self.sweep_soon()

    async def _commit(self, prepared: Prepared, keys: list[str], held: AsyncExitStack) -> int:
        async with held, self._room_lock:  # nobody counts the document twice, as held and as stored, or not at all
            orphans = await self._threads.call(self._library.commit, prepared, keys)
            self._changed()
        if prepared.renews is None:  # else no caller changed it
            audit.current.get().changed(prepared.document.id)
        return await self._dropped(orphans)

    async def _delete(self, document_id: str) -> int:
        orphans = await self._threads.call(self._library.delete, document_id)
        self._changed()
        audit.current.get().changed(document_id)
        return await self._dropped(orphans)

    async def _dropped(self, orphans: Iterable[Orphan]) -> int:
        """How many of these chunks no document is about to hold. Their KV is gone, unless that failed for now."""
        dropped = sum(orphan.content_key not in self._being_ingested for orphan in orphans)
        if dropped:
            await self.sweep()
        return dropped

    # ------------------------------------------------------------------------------------------ forgetting

    async def sweep(self) -> None:
        """Forget the KV of chunks that no document holds, nor is about to; what fails is tried again later.

        Once this is being closed, what is left stays in the catalog's list, for when the documents are opened again.
        """
        try:
            async with self._sweeping:  # a second one would find what the first is about to forget
                await self._forget_pending()
        except Exception as error:  # noqa: BLE001 - it is still in the catalog's list, and no request's fault
            logger.warning("event=forget_postponed code=%s", status_of(error).code.name)
            if self._retry is not None:
                self._retry.cancel()
            self._retry = asyncio.get_running_loop().call_later(self._retry_seconds, self.sweep_soon)
            self._retry_seconds = min(2 * self._retry_seconds, _MOST_RETRY_SECONDS)
        else:
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
            self._retry_seconds = _RETRY_SECONDS

    async def _forget_pending(self) -> None:
        """Forget what is listed now, part by part: between two of them the worker's thread is for others."""
        pending = await self._threads.call(self._library.pending_forget)
        for start in range(0, len(pending), _FORGET_AT_ONCE):
            if start and self._closing:
                return
            # What comes to be ingested from here on has its KV computed behind this part, in the same thread.
            kept = frozenset(self._being_ingested)
            await self._worker.call(self._forget, pending[start : start + _FORGET_AT_ONCE], kept)

    def _forget(self, orphans: Iterable[Orphan], kept: frozenset[str]) -> None:
        doomed: list[Orphan] = []
        keys: set[str] = set()
        for orphan in orphans:
            # A question may have had the chunk computed again for the present model, under a key no document has.
            present = self._engine.content_key(orphan.chunk, namespace=self._namespace)
            if kept.isdisjoint((orphan.content_key, present)):
                doomed.append(orphan)
                keys.update((orphan.content_key, present))
        if doomed:
            self._engine.forget_keys(key for key in keys if not self._library.references(key))
            self._library.forgotten(doomed)

    def sweep_soon(self) -> None:
        """Sweep in the background, unless a sweep is about to begin anyway."""
        if not self._sweep_due:
            self._sweep_due = True
            self._task(self._swept())

    async def _swept(self) -> None:
        self._sweep_due = False
        await self.sweep()

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end even where the caller is cancelled: the catalog has changed, so the KV must."""
        return await asyncio.shield(self._task(work))

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, NotFound):
            # Its caller, if still there, reports it; if not, this is all that is left of it.
            logger.warning("event=unfinished_change error=%s", type(error).__name__)

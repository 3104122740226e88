"""The rpcs of ``blend.v1.BlendService``."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from time import perf_counter, time
from typing import Any, TypeVar

import grpc

import blend
from blend.config import ServerConfig
from blend.engine import Engine
from blend.errors import Closed, NotFound
from blend.rag.library import Library, Passage, Prepared
from blend.rag.prompt import PromptBuilder
from blend.rag.records import Orphan
from blend.types import Answer, Chunk, Token
from blend_server import convert
from blend_server.interceptors import request_id, status_of
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc
from blend_server.worker import Worker

logger = logging.getLogger("blend_server")

T = TypeVar("T")

# Threads for the library: embedding, search, SQLite. One long document must not keep questions waiting.
_LIBRARY_THREADS = 4


class NoDocuments(NotFound):
    """There is nothing to answer from. ``outdated`` counts documents that another model or chunk size was used for."""

    def __init__(self, outdated: int) -> None:
        super().__init__("document", "")
        why = f"all {outdated} documents are outdated; ingest them again" if outdated else "ingest some first"
        self.args = (f"there are no documents to answer from: {why}",)


class BlendService(blend_pb2_grpc.BlendServiceServicer):
    """Serves one engine and one library, on one event loop.

    The engine runs one call at a time in a thread of its own; requests for it queue up and are refused beyond
    ``config.max_queue``. All stored KV is changed from that thread, in order of the requests.
    """

    def __init__(self, engine: Engine, library: Library, config: ServerConfig) -> None:
        self._engine = engine
        self._library = library
        self._config = config
        self._prompts = PromptBuilder(engine.tokenizer, config.rag.system, config.rag.answer_prefix)
        self._worker = Worker("blend-engine", config.max_queue)
        self._pool = ThreadPoolExecutor(_LIBRARY_THREADS, thread_name_prefix="blend-library")
        self._started = time()
        self._being_ingested: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Finish what must not be left half done and end both kinds of threads; engine and library stay open."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._worker.close()
        await asyncio.to_thread(self._pool.shutdown)

    async def _in_library(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    # ------------------------------------------------------------------------------------------- documents

    async def Ingest(
        self, request_iterator: AsyncIterable[pb.Document], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.IngestProgress, None]:
        """Take documents; see the proto file."""
        index = 0
        with self._worker.admit():
            async for document in request_iterator:
                async with aclosing(self._ingest(document)) as stages:
                    async for stage in stages:
                        stage.index, stage.document_id = index, document.id
                        yield stage
                index += 1

    async def _ingest(self, document: pb.Document) -> AsyncGenerator[pb.IngestProgress, None]:
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
            yield pb.IngestProgress(failed=pb.IngestProgress.Failed(code=status.code.name, message=status.message))

    async def _stages(self, document: pb.Document) -> AsyncGenerator[pb.IngestProgress, None]:
        library = self._library
        title = convert.title(document.title)
        prepared = await self._in_library(library.prepare, document.id, title, document.content)
        if prepared.unchanged:
            yield pb.IngestProgress(unchanged=pb.IngestProgress.Unchanged(chunks=len(prepared.chunks)))
            return
        chunks = prepared.chunks
        tokens = sum(len(chunk) for chunk in chunks)
        yield pb.IngestProgress(chunked=pb.IngestProgress.Chunked(chunks=len(chunks), tokens=tokens))
        prepared = await self._in_library(library.embed, prepared)
        yield pb.IngestProgress(embedded=pb.IngestProgress.Embedded(chunks=len(chunks)))
        keys = await self._in_library(self._keys, chunks)
        with self._kept(keys):
            missing = await self._worker.call(self._engine.missing, chunks)
            reused = len(chunks) - len(missing)
            for done in range(len(missing) + 1):
                if done:
                    await self._worker.call(self._engine.precompute, [missing[done - 1]])
                counts = pb.IngestProgress.Computed(done=reused + done, total=len(chunks), reused=reused)
                yield pb.IngestProgress(computed=counts)
            dropped = await self._to_the_end(self._commit(prepared, keys))
        yield pb.IngestProgress(stored=pb.IngestProgress.Stored(chunks=len(chunks), dropped_chunks=dropped))

    def _keys(self, chunks: Iterable[Chunk]) -> list[str]:
        return [self._engine.content_key(chunk) for chunk in chunks]

    @contextmanager
    def _kept(self, keys: list[str]) -> Iterator[None]:
        """Keep the KV of a document that is being ingested from going with the last other document that has it."""
        self._being_ingested.update(keys)
        try:
            yield
        finally:
            self._being_ingested -= Counter(keys)

    async def _commit(self, prepared: Prepared, keys: list[str]) -> int:
        with self._kept(keys):  # for itself: the request that began this may be gone before it is done
            orphans = await self._in_library(self._library.commit, prepared, keys)
        return await self._forget(orphans)

    async def _delete(self, document_id: str) -> int:
        return await self._forget(await self._in_library(self._library.delete, document_id))

    async def _forget(self, orphans: Iterable[Orphan]) -> int:
        """Drop the KV of chunks that no document holds, nor is about to; returns how many chunks."""
        doomed = [orphan.chunk for orphan in orphans if orphan.content_key not in self._being_ingested]
        if doomed:
            await self._worker.call(self._engine.forget, doomed)
        return len(doomed)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end even where the caller is cancelled: the catalog has changed, so the KV must."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its caller, if still there, reports it; if not, this is all that is left of it.
            logger.warning("event=unfinished_change error=%s", type(error).__name__)

    async def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListDocumentsResponse:
        """List documents; see the proto file."""
        size = convert.count(request, "page_size", convert.DEFAULT_PAGE_SIZE, most=convert.MAX_PAGE_SIZE)
        page = await self._in_library(self._library.list, size, request.page_token)
        documents = [convert.document_to_proto(info) for info in page.documents]
        return pb.ListDocumentsResponse(documents=documents, next_page_token=page.next_page_token)

    async def GetDocument(self, request: pb.GetDocumentRequest, context: grpc.aio.ServicerContext) -> pb.DocumentInfo:
        """Return a document; see the proto file."""
        return convert.document_to_proto(await self._in_library(self._library.get, request.id))

    async def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteDocumentResponse:
        """Delete a document; see the proto file."""
        return pb.DeleteDocumentResponse(dropped_chunks=await self._to_the_end(self._delete(request.id)))

    # ------------------------------------------------------------------------------------------- questions

    async def Retrieve(self, request: pb.RetrieveRequest, context: grpc.aio.ServicerContext) -> pb.RetrieveResponse:
        """Find passages; see the proto file."""
        question = convert.question(request.question)
        k = convert.count(request, "k", self._config.rag.top_k, most=convert.MAX_PASSAGES)
        found = await self._in_library(self._library.retrieve, question, k)
        return pb.RetrieveResponse(passages=[convert.passage_to_proto(passage) for passage in found])

    async def Answer(
        self, request: pb.AnswerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.AnswerEvent, None]:
        """Answer a question; see the proto file."""
        question = convert.question(request.question)
        k = convert.count(request, "k", self._config.rag.top_k, most=convert.MAX_PASSAGES)
        length = convert.count(request, "max_new_tokens", self._config.rag.max_new_tokens)
        plan = convert.plan_from_proto(request.plan)
        with self._worker.admit():
            passages, retrieve_ms = await self._passages(question, k)
            if request.HasField("passage_order_seed"):
                random.Random(request.passage_order_seed).shuffle(passages)
            prompt = await self._in_library(self._prompts.build, [passage.chunk for passage in passages], question)
            # Refuses what it cannot run, before the first event goes out, and starts the request's clock.
            events = self._engine.stream(
                prompt,
                max_new_tokens=length,
                plan=plan,
                compare_full=request.compare_full,
                positions=request.want_positions,
            )
            shown = [convert.passage_to_proto(passage) for passage in passages]
            yield pb.AnswerEvent(passages=pb.Passages(passages=shown, retrieve_ms=retrieve_ms))
            stream = self._worker.stream(events)
            context.add_done_callback(lambda _: stream.cancel())
            async for event in stream:
                if isinstance(event, Token):
                    yield pb.AnswerEvent(token=convert.token_to_proto(event))
                else:
                    yield pb.AnswerEvent(answer=convert.answer_to_proto(_with_wait(event, stream.waited_ms)))

    async def _passages(self, question: str, k: int) -> tuple[list[Passage], float]:
        """The passages for a question and the milliseconds that it took to find them.

        Raises:
            NoDocuments: there are none.
        """
        start = perf_counter()
        passages = list(await self._in_library(self._library.retrieve, question, k))
        if not passages:
            raise NoDocuments(len(self._library.outdated()))
        return passages, (perf_counter() - start) * 1e3

    # ----------------------------------------------------------------------------------------------- stats

    async def GetStats(self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext) -> pb.Stats:
        """Return figures; see the proto file."""
        engine = await self._in_library(self._engine.stats)
        corpus = await self._in_library(self._library.stats)
        config = self._config
        stats = pb.Stats(
            version=blend.__version__,
            corpus=convert.corpus_to_proto(corpus),
            queue=pb.QueueStats(requests=self._worker.requests, max_queue=config.max_queue),
            engine=convert.engine_to_proto(engine),
            limits=pb.Limits(
                max_document_bytes=config.rag.max_document_bytes,
                max_message_bytes=config.max_message_bytes,
                default_k=config.rag.top_k,
                default_max_new_tokens=config.rag.max_new_tokens,
                context_tokens=engine.max_positions,
            ),
        )
        stats.started_at.FromMilliseconds(int(self._started * 1e3))
        return stats


def _with_wait(answer: Answer, waited_ms: float) -> Answer:
    """The answer with the wait for the engine's thread in its queue time, as it is in its first-token time."""
    timings = replace(answer.report.timings, queue=answer.report.timings.queue + waited_ms)
    return replace(answer, report=replace(answer.report, timings=timings))

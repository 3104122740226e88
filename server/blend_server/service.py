"""The rpcs of ``blend.v1.BlendService``."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from time import monotonic, perf_counter, time

import grpc

import blend
from blend.config import ServerConfig
from blend.errors import NotFound
from blend.rag.catalog import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from blend.rag.library import Passage
from blend.rag.prompt import PromptBuilder
from blend.rag.protocols import Embedder
from blend.types import Answer, Token
from blend.versions import environment
from blend_server import audit, convert, facts
from blend_server.auth import Gate, caller
from blend_server.engines import ServedEngine
from blend_server.operations import observing
from blend_server.operations.context import request_id
from blend_server.operations.figures import Sources
from blend_server.places import Places
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc
from blend_server.tenants import Tenant, Tenants
from blend_server.threads import Threads
from blend_server.worker import Worker

# Threads for the library: embedding, search, SQLite. One long document must not keep questions waiting.
_LIBRARY_THREADS = 4

# An answer's end has so many seconds to reach the client before the call's deadline, at most that share of its time.
_LAST_WORD_SECONDS = 0.5
_LAST_WORD_SHARE = 0.2


class NoDocuments(NotFound):
    """There is nothing to answer from. ``outdated`` counts documents that another model or chunk size was used for."""

    def __init__(self, outdated: int) -> None:
        super().__init__("document", "")
        why = "ingest some first"
        if outdated:
            why = f"all {outdated} documents are outdated; they are being processed again, try again later"
        self.args = (f"there are no documents to answer from: {why}",)


class BlendService(blend_pb2_grpc.BlendServiceServicer):
    """Serves one engine and the documents of all tenants, on one event loop.

    Answers are generated together; documents go in and out one after another, from one thread. Requests for the
    engine are refused beyond ``config.max_queue``: answers that are not generated yet, and documents that come in, each
    for itself. Whose documents a call is about is never in its message: it goes by :data:`blend_server.auth.caller`.
    """

    def __init__(self, engine: ServedEngine, embedder: Embedder, config: ServerConfig, gate: Gate) -> None:
        self._engine = engine
        self._config = config
        self._prompts = PromptBuilder(engine.tokenizer, config.rag.system, config.rag.answer_prefix)
        self._worker = Worker("blend-engine", config.max_queue)
        self._threads = Threads("blend-library", _LIBRARY_THREADS)
        self._places = Places(config.max_queue + 1, "the queue before the engine is full") if gate.many else None
        most = config.security.max_open_tenants
        self._tenants = Tenants(config.path, config.rag, engine, self._worker, self._threads, embedder, gate, most)
        self._started = time()

    async def start(self) -> None:
        """Open the documents; call it before the first request. What an earlier run left behind goes meanwhile.

        Raises:
            StoreError: the default tenant's documents cannot be used.
        """
        await self._tenants.start()

    @property
    def alive(self) -> bool:
        """Whether there is an engine that takes requests."""
        return self._engine.alive

    def sources(self, serving: Callable[[], bool], tenants: Callable[[], Collection[str]]) -> Sources:
        """Where metrics come from; ``serving``: whether calls are taken, ``tenants``: who has metrics of its own."""
        return Sources(
            stats=self._engine.stats,
            serving=lambda: serving() and self.alive,
            places_held=lambda: self._worker.requests,
            places=self._config.max_queue + 1,
            open_tenants=lambda: self._tenants.opened,
            conditioning=self._tenants.conditioning.stats,
            tenants=tenants,
        )

    async def close(self) -> None:
        """Finish what must not be left half done, end all threads, close all documents; the engine stays open."""
        self._engine.stop_background()  # nothing is to wait for it now
        await self._tenants.finish()
        await self._worker.close()
        await self._threads.close()
        self._tenants.close()

    @asynccontextmanager
    async def _tenant(self, document: str | None = None) -> AsyncGenerator[Tenant, None]:
        """The tenant that a call comes from; ``document`` is the one that it is about, for the audit log."""
        audit.current.get().document = document
        async with self._tenants.use(caller.get().tenant) as tenant:
            yield tenant

    @contextmanager
    def _place(self) -> Iterator[None]:
        """A place in the queue before the engine, for the tenant that a call comes from."""
        share = self._places.hold(caller.get().tenant) if self._places is not None else nullcontext()
        with share, self._worker.admit():
            yield

    # ------------------------------------------------------------------------------------------- documents

    async def Ingest(
        self, request_iterator: AsyncIterable[pb.Document], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.IngestProgress, None]:
        """Take documents; see the proto file."""
        index = 0
        async with self._tenant() as tenant:
            async for document in request_iterator:
                with self._place():
                    async with aclosing(tenant.ingestion.ingest(document)) as stages:
                        async for stage in stages:
                            stage.index, stage.document_id = index, document.id
                            yield stage
                index += 1

    async def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListDocumentsResponse:
        """List documents; see the proto file."""
        size = convert.count(request, "page_size", DEFAULT_PAGE_SIZE, most=MAX_PAGE_SIZE)
        async with self._tenant() as tenant:
            page = await tenant.threads.call(tenant.library.list, size, request.page_token)
        documents = [facts.document_to_proto(info) for info in page.documents]
        return pb.ListDocumentsResponse(documents=documents, next_page_token=page.next_page_token)

    async def GetDocument(self, request: pb.GetDocumentRequest, context: grpc.aio.ServicerContext) -> pb.DocumentInfo:
        """Return a document; see the proto file."""
        async with self._tenant(request.id) as tenant:
            return facts.document_to_proto(await tenant.threads.call(tenant.library.get, request.id))

    async def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteDocumentResponse:
        """Delete a document; see the proto file."""
        async with self._tenant(request.id) as tenant:
            return pb.DeleteDocumentResponse(dropped_chunks=await tenant.ingestion.delete(request.id))

    # ------------------------------------------------------------------------------------------- questions

    async def Retrieve(self, request: pb.RetrieveRequest, context: grpc.aio.ServicerContext) -> pb.RetrieveResponse:
        """Find passages; see the proto file."""
        question = convert.question(request.question)
        k = convert.count(request, "k", self._config.rag.top_k, most=convert.MAX_PASSAGES)
        async with self._tenant() as tenant:
            found = await tenant.threads.call(tenant.library.retrieve, question, k)
        return pb.RetrieveResponse(passages=[facts.passage_to_proto(passage) for passage in found])

    async def Answer(
        self, request: pb.AnswerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.AnswerEvent, None]:
        """Answer a question; see the proto file."""
        # Now, for gRPC reckons what is left by a clock that may jump while passages are sought.
        arrived, deadline = perf_counter(), _deadline(context)
        question = convert.question(request.question)
        k = convert.count(request, "k", self._config.rag.top_k, most=convert.MAX_PASSAGES)
        sampling = convert.sampling_from_proto(request, self._config.rag.max_new_tokens)
        plan = convert.plan_from_proto(request.plan)
        async with AsyncExitStack() as held:
            place = held.enter_context(ExitStack())
            place.enter_context(self._place())
            tenant = await held.enter_async_context(self._tenant())
            passages, retrieve_ms = await self._passages(tenant, question, k)
            if request.HasField("passage_order_seed"):
                random.Random(request.passage_order_seed).shuffle(passages)
            prompt = await tenant.threads.call(self._prompts.build, [passage.chunk for passage in passages], question)
            # Refuses what it cannot run, before the first event goes out.
            events = self._engine.stream(
                prompt,
                namespace=tenant.name,
                sampling=sampling,
                plan=plan,
                compare_full=request.compare_full,
                positions=request.want_positions,
                arrived=arrived,
                deadline=deadline,
                request_id=request_id.get(),
            )
            stream = self._worker.stream(events)
            observing.current.get().generating(stream.ended)
            context.add_done_callback(lambda _: stream.cancel())
            # Whoever reads slowly keeps no place: what is still to be read is no longer than the answer.
            stream.ended.add_done_callback(lambda _: place.close())
            shown = [facts.passage_to_proto(passage) for passage in passages]
            yield pb.AnswerEvent(passages=pb.Passages(passages=shown, retrieve_ms=retrieve_ms))
            async for event in stream:
                if isinstance(event, Token):
                    yield pb.AnswerEvent(token=convert.token_to_proto(event))
                else:
                    tenant.answered += 1
                    answer = _with_wait(event, stream.waited_ms)
                    observing.current.get().answered(answer, arrived, retrieve_ms)
                    if request.want_tokens:
                        pieces = self._engine.tokenizer.pieces
                        told = await tenant.threads.call(convert.prompt_to_proto, prompt, pieces)
                        yield pb.AnswerEvent(prompt_tokens=told)
                    yield pb.AnswerEvent(answer=convert.answer_to_proto(answer))

    async def _passages(self, tenant: Tenant, question: str, k: int) -> tuple[list[Passage], float]:
        """The passages for a question and the milliseconds that it took to find them.

        Raises:
            NoDocuments: there are none.
        """
        start = perf_counter()
        passages = list(await tenant.threads.call(tenant.library.retrieve, question, k))
        if not passages:
            raise NoDocuments(len(await tenant.threads.call(tenant.library.outdated)))
        return passages, (perf_counter() - start) * 1e3

    # ----------------------------------------------------------------------------------------------- stats

    async def GetStats(self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext) -> pb.Stats:
        """Return figures; see the proto file."""
        config, whole = self._config, caller.get().may("admin")
        async with self._tenant() as tenant:
            engine = await tenant.threads.call(self._engine.stats)
            corpus = await tenant.threads.call(tenant.library.stats)
        if whole:
            figures, requests = facts.engine_to_proto(engine), self._worker.requests
        else:
            figures = facts.engine_to_proto_for(tenant.name, tenant.answered, engine)
            requests = self._places.held_by(tenant.name) if self._places is not None else 0
        stats = pb.Stats(
            version=blend.__version__,
            corpus=facts.corpus_to_proto(corpus, self._tenants.conditioning.counts(tenant.name)),
            queue=pb.QueueStats(requests=requests, max_queue=config.max_queue),
            engine=figures,
            limits=pb.Limits(
                max_document_bytes=config.rag.max_document_bytes,
                max_message_bytes=config.max_message_bytes,
                default_k=config.rag.top_k,
                default_max_new_tokens=config.rag.max_new_tokens,
                context_tokens=engine.max_positions,
            ),
            environment=facts.environment_to_proto(environment(engine), budgets=whole),
        )
        stats.started_at.FromMilliseconds(int(self._started * 1e3))
        return stats

    async def ResetQuality(
        self, request: pb.ResetQualityRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResetQualityResponse:
        """Let ``auto`` blend again; see the proto file."""
        async with self._tenant() as tenant:
            trip = await tenant.threads.call(self._engine.reset_shadow)
        if trip is None:
            return pb.ResetQualityResponse()
        return pb.ResetQualityResponse(was_stopped=True, since=trip.since, reason=trip.reason)


def _with_wait(answer: Answer, waited_ms: float) -> Answer:
    """The answer with the wait for a thread in its queue time, as it is in its first-token time."""
    timings = replace(answer.report.timings, queue=answer.report.timings.queue + waited_ms)
    return replace(answer, report=replace(answer.report, timings=timings))


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    """When an answer ends, a reading of :func:`time.monotonic`; ``None``: never.

    That is a little before the client stops waiting: what there is by then has to reach it.
    """
    left = context.time_remaining()
    return None if left is None else monotonic() + left - min(_LAST_WORD_SECONDS, left * _LAST_WORD_SHARE)

"""The service as a Python object for asyncio: :class:`~blend_server.client.api.Client`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from blend.config import ServerConfig
from blend.errors import InvalidInput
from blend.types import Answer
from blend_server.client.api import TIMEOUT
from blend_server.client.credentials import Endpoint, Tls
from blend_server.client.failures import service_error
from blend_server.client.messages import (
    AnswerEvent,
    AnswerOptions,
    Document,
    answer_event,
    answer_request,
    build,
    last_answer,
)
from blend_server.client.outbox import ENDS, Outbox, Sent, Try
from blend_server.client.retries import Attempts, Retries, check_timeout
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


class AsyncClient:
    """A connection to a server for one event loop, the one of its first call; also an asynchronous context manager.

    Any number of tasks may use it at once. What its methods do, return and raise is what those of
    :class:`~blend_server.client.api.Client` do, as are its arguments. Leave an iterator early through
    :func:`contextlib.aclosing`, or what it stands for goes on until the iterator is collected.
    """

    def __init__(
        self,
        address: str = ServerConfig.address,
        *,
        max_message_bytes: int = ServerConfig.max_message_bytes,
        timeout: float = TIMEOUT,
        token: str | None = None,
        tls: Tls | None = None,
        retries: Retries | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.address = address
        self._timeout = check_timeout(timeout)
        self._retries = retries or Retries()
        self._clock, self._sleep = clock, sleep
        self._endpoint = Endpoint(address, max_message_bytes, token, tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._made: Any = None

    async def ingest(
        self, documents: Iterable[Document] | AsyncIterable[Document]
    ) -> AsyncGenerator[pb.IngestProgress, None]:
        """Send documents, which may come from an asynchronous iterable; yields the progress of each."""
        stub = self._stub
        async with aclosing(_Sender(documents, (await self.stats()).limits)) as sender:
            attempts = Attempts(self._retries, None, self._clock)
            while True:
                stream = Try()
                call = stub.Ingest(sender.messages(stream), metadata=self._endpoint.metadata())
                try:
                    async for told in call:
                        if told.WhichOneof("stage") in ENDS:
                            attempts.progressed()
                        for one in sender.outbox.progress(stream, told):
                            yield one
                    break
                except grpc.RpcError as error:
                    pause = attempts.pause(error)
                finally:
                    call.cancel()
                await self._sleep(pause)
            for one in sender.outbox.refused():
                yield one
            if sender.error is not None:
                raise sender.error

    async def answer(
        self, question: str, *, timeout: float | None = None, **options: Unpack[AnswerOptions]
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Ask; yields the prompt's passages, then each token, then the answer with its report."""
        request = answer_request(question, **options)
        attempts = Attempts(self._retries, None if timeout is None else check_timeout(timeout), self._clock)
        stub = self._stub
        while True:
            handed_out = False
            call = stub.Answer(request, timeout=attempts.left(), metadata=self._endpoint.metadata())
            try:
                async for event in call:
                    handed_out = True
                    yield answer_event(event)
                return
            except grpc.RpcError as error:
                if handed_out:
                    raise service_error(error) from error
                pause = attempts.pause(error)
            finally:
                call.cancel()
            await self._sleep(pause)

    async def ask(self, question: str, *, timeout: float | None = None, **options: Unpack[AnswerOptions]) -> Answer:
        """Ask and wait for the answer."""
        return last_answer([event async for event in self.answer(question, timeout=timeout, **options)])

    async def retrieve(self, question: str, k: int | None = None) -> list[pb.Passage]:
        """Return the passages that fit a question best, best first."""
        reply = await self._unary(self._stub.Retrieve, build(pb.RetrieveRequest, question=question, k=k))
        return list(reply.passages)

    async def documents(self, page_size: int | None = None) -> AsyncGenerator[pb.DocumentInfo, None]:
        """Yield all documents by id, fetched in pages."""
        token = ""
        while True:
            request = build(pb.ListDocumentsRequest, page_size=page_size, page_token=token)
            reply = await self._unary(self._stub.ListDocuments, request)
            for document in reply.documents:
                yield document
            if not (token := reply.next_page_token):
                return

    async def get(self, document_id: str) -> pb.DocumentInfo:
        """Return one document."""
        request = build(pb.GetDocumentRequest, id=document_id)
        reply: pb.DocumentInfo = await self._unary(self._stub.GetDocument, request)
        return reply

    async def delete(self, document_id: str) -> int:
        """Delete a document; returns how many chunks went with it, 0 where an earlier try may have deleted it."""
        request, gone = build(pb.DeleteDocumentRequest, id=document_id), pb.DeleteDocumentResponse()
        return int((await self._unary(self._stub.DeleteDocument, request, gone)).dropped_chunks)

    async def stats(self) -> pb.Stats:
        """Return the server's figures and limits."""
        reply: pb.Stats = await self._unary(self._stub.GetStats, pb.GetStatsRequest())
        return reply

    async def reset_quality(self) -> pb.ResetQualityResponse:
        """Let ``auto`` blend again after its quality stopped it; returns whether it was, since when, and why."""
        reply: pb.ResetQualityResponse = await self._unary(self._stub.ResetQuality, pb.ResetQualityRequest())
        return reply

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _stub(self) -> Any:
        """The stub of a channel in the running event loop, made at the first call: gRPC binds it to that loop."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._channel = loop, self._endpoint.aio_channel()
            self._made = BlendServiceStub(self._channel)  # type: ignore[no-untyped-call]
        elif loop is not self._loop:
            raise InvalidInput("event loop", "another one", "the one of the first call; make a client for each")
        return self._made

    async def _unary(self, method: Callable[..., Any], request: object, gone: object = None) -> Any:
        """Call until it succeeds or is not to be tried again; ``gone`` as for the blocking client."""
        attempts = Attempts(self._retries, self._timeout, self._clock)
        while True:
            try:
                return await method(request, timeout=attempts.left(), metadata=self._endpoint.metadata())
            except grpc.RpcError as error:
                if gone is not None and attempts.done_before(error):
                    return gone
                pause = attempts.pause(error)
            await self._sleep(pause)


class _Sender:
    """The request side of one ingestion, through all its tries.

    gRPC cancels the task that iterates a stream's documents when the stream ends. The caller's iterator is not to be
    cancelled with it, so it is drawn in a task of its own, which the next try goes on waiting for.
    """

    def __init__(self, documents: Iterable[Document] | AsyncIterable[Document], limits: pb.Limits) -> None:
        self.outbox = Outbox(limits)
        self.error: Exception | None = None
        self._documents = _each(documents)
        self._drawing = asyncio.Lock()
        self._drawn: asyncio.Future[Document] | None = None

    async def messages(self, stream: Try) -> AsyncIterator[pb.Document]:
        """Yield a try's documents: those without an answer, then the caller's next ones."""
        while (sent := self.outbox.after(stream.last) or await self._next(stream.last)) is not None:
            stream.places.append(sent.place)
            yield sent.message

    async def aclose(self) -> None:
        """Let the caller's iterator go."""
        if self._drawn is not None:
            self._drawn.cancel()
            await asyncio.wait([self._drawn])
        await self._documents.aclose()

    async def _next(self, last: int) -> Sent | None:
        async with self._drawing:
            while (sent := self.outbox.after(last)) is None:
                if self._drawn is None:
                    self._drawn = asyncio.ensure_future(anext(self._documents))
                await asyncio.wait([self._drawn])
                try:
                    self.outbox.put(self._drawn.result())
                except StopAsyncIteration:
                    return None
                except Exception as error:  # noqa: BLE001
                    # Handed to whoever reads the progress: gRPC, in whose task this runs, would hide it.
                    self.error = error
                    return None
                self._drawn = None
            return sent


async def _each(documents: Iterable[Document] | AsyncIterable[Document]) -> AsyncGenerator[Document, None]:
    if isinstance(documents, AsyncIterable):
        async for document in documents:
            yield document
    else:
        for document in documents:
            yield document

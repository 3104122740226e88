"""The rpcs of ``blend.v1.BlendService``, as the router serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

import grpc

from blend_server import convert
from blend_server.hosting import SERVICE_NAME
from blend_server.interceptors import read_message
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.router.calls import ENGINE_KEY, Call, Guard, NoEngine, handed_on
from blend_server.router.choice import Chooser
from blend_server.router.documents import Documents
from blend_server.router.figures import merged
from blend_server.router.link import Link

_ELSEWHERE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Codes of an engine that has not begun an answer after which another one is asked."""
_LOCATE_SECONDS = 2.0
"""Longest that finding out which chunks a question needs may take; without it an answer goes by load alone."""


class _Tries:
    """The engines that one call is tried on, each once.

    Args:
        documents: knows who may be asked.
        chooser: puts engines in order.
        call: the call.

    Attributes:
        order: those that may be asked, the best first.
        failure: the last engine's error; ``None``: none was asked yet.
    """

    def __init__(self, documents: Documents, chooser: Chooser, call: Call) -> None:
        self._documents = documents
        self._chooser = chooser
        self._call = call
        self._tried: list[Link] = []
        self.order: Sequence[Link] = ()
        self.failure: Exception | None = None

    async def next(self) -> Link:
        """Return the next engine. The order may be old by now.

        Raises:
            NoEngine: none may be asked, nor was any.
            AioRpcError, NoEngine: all that may be asked have been; the last one's error.
        """
        found = self._left()
        if found is None:
            try:
                self.order = self._chooser.order(await self._documents.readable(self._call))
            except NoEngine:
                if self.failure is None:
                    raise
            found = self._left()
        if found is None:
            raise self.failure or NoEngine("no engine may be asked any more; try again")
        self._tried.append(found)
        return found

    def _left(self) -> Link | None:
        return next((link for link in self.order if link not in self._tried and link.holds(self._call.owner)), None)

    def failed(self, link: Link, error: grpc.aio.AioRpcError) -> Exception:
        """Note an engine's error; returns it as the caller would be told.

        Raises:
            AioRpcError: another engine would say the same.
        """
        if error.code() not in _ELSEWHERE:
            raise error
        gone = error.code() is grpc.StatusCode.CANCELLED  # not by the caller: that would have ended the call
        self.failure = NoEngine(f"engine {link.name} went away; try again") if gone else error
        return self.failure


class RouterService:
    """Hands calls on to engines, on one event loop.

    Args:
        documents: keeps the engines' documents alike, and knows who may be asked.
        chooser: puts engines in order.
        guard: is around every call.
    """

    def __init__(self, documents: Documents, chooser: Chooser, guard: Guard) -> None:
        self._documents = documents
        self._chooser = chooser
        self._guard = guard
        self._turn = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the rpcs for a server; messages are bytes."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "Ingest": grpc.stream_stream_rpc_method_handler(self.ingest),
            "Answer": stream(self.answer),
            "DeleteDocument": unary(self.delete),
            "GetStats": unary(self.stats),
            "ResetQuality": unary(self.reset_quality),
            **{name: unary(self._read(name)) for name in ("Retrieve", "ListDocuments", "GetDocument")},
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    async def ingest(self, requests: AsyncIterable[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        """Have every engine take the documents, one after another."""
        index = 0
        async with self._guard.call("Ingest", context) as call:
            async for request in requests:
                await self._guard.gate.recheck(call.who)
                document = read_message(pb.Document.FromString, request)
                async with aclosing(self._documents.ingest(call, document.id, request)) as stages:
                    async for stage in stages:
                        stage.index, stage.document_id = index, document.id
                        yield stage.SerializeToString()
                index += 1

    async def delete(self, request: bytes, context: Any) -> bytes:
        """Have every engine delete a document."""
        async with self._guard.call("DeleteDocument", context) as call:
            outcome = await self._documents.delete(call, read_message(pb.DeleteDocumentRequest.FromString, request).id)
        return outcome.deleted

    async def answer(self, request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        """Have the best engine answer; another one where it fails before its first event."""
        async with self._guard.call("Answer", context, greet=False) as call:
            asked = read_message(pb.AnswerRequest.FromString, request)
            convert.question(asked.question)
            links = await self._documents.readable(call)
            tries = _Tries(self._documents, self._chooser, call)
            tries.order = self._chooser.order(links, await self._keys(call, links, asked))
            while True:
                link, begun = await tries.next(), False
                try:
                    async with aclosing(self._answer(link, request, call)) as events:
                        async for event in events:
                            begun = True
                            yield event
                    return
                except grpc.aio.AioRpcError as error:
                    failure = tries.failed(link, error)
                    if begun:
                        raise failure from error

    async def _answer(self, link: Link, request: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        """One engine's events."""
        self._turn += 1
        with link.answering(self._turn), ExitStack() as ended:
            stream = link.streaming("Answer", request, call.metadata, call.seconds_left)
            ended.callback(stream.cancel)
            event = await stream.read()
            await call.context.send_initial_metadata(
                (*handed_on(await stream.initial_metadata()), (ENGINE_KEY, link.name))
            )
            while event is not grpc.aio.EOF:
                yield event
                event = await stream.read()
            call.context.set_trailing_metadata(handed_on(await stream.trailing_metadata()))

    async def _keys(self, call: Call, links: Sequence[Link], asked: pb.AnswerRequest) -> list[str]:
        """The content keys of the chunks that a question needs, where they make a difference."""
        if len(links) < 2 or not self._chooser.objects():
            return []
        wanted = pb.RetrieveRequest(question=asked.question)
        if asked.HasField("k"):
            wanted.k = asked.k
        link = self._chooser.order(links)[0]
        left = call.seconds_left
        seconds = _LOCATE_SECONDS if left is None else min(left, _LOCATE_SECONDS)
        try:
            reply = await link.unary("Retrieve", wanted.SerializeToString(), call.metadata, seconds)
        except grpc.aio.AioRpcError:
            return []  # whoever answers says what is wrong, if anything is
        return [passage.key for passage in pb.RetrieveResponse.FromString(reply).passages]

    def _read(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """A call that any engine can serve."""

        async def read(request: bytes, context: Any) -> bytes:
            async with self._guard.call(method, context) as call:
                tries = _Tries(self._documents, self._chooser, call)
                while True:
                    link = await tries.next()
                    reply = link.unary(method, request, call.metadata, call.seconds_left)
                    try:
                        data: bytes = await reply
                    except grpc.aio.AioRpcError as error:
                        tries.failed(link, error)
                        continue
                    trailing = (*handed_on(await reply.trailing_metadata()), (ENGINE_KEY, link.name))
                    context.set_trailing_metadata(trailing)
                    return data

        return read

    async def stats(self, request: bytes, context: Any) -> bytes:
        """Return the figures of all engines that serve, put together."""
        async with self._guard.call("GetStats", context) as call:
            links = await self._documents.readable(call)

            async def figures(link: Link) -> pb.Stats | None:
                try:
                    data = await link.unary("GetStats", request, call.metadata, call.seconds_left)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _ELSEWHERE:
                        raise
                    return None
                told: pb.Stats = read_message(pb.Stats.FromString, data)
                return told

            found = await asyncio.gather(*(figures(link) for link in links))
            by_name = {link.name: stats for link, stats in zip(links, found, strict=True) if stats is not None}
            if not by_name:
                raise NoEngine("no engine tells its figures now")
            whole = call.who.may("admin")
            data: bytes = merged(by_name, await self._documents.status() if whole else None).SerializeToString()
        return data

    async def reset_quality(self, request: bytes, context: Any) -> bytes:
        """Have every engine that serves let ``auto`` blend again.

        It is not about documents: those that lack some are asked, too. One that fails does not keep the others from
        it; the error names it.
        """
        async with self._guard.call("ResetQuality", context) as call:
            links = self._documents.serving()
            if not links:
                raise NoEngine("no engine serves now")
            replies = (link.unary("ResetQuality", request, call.metadata, call.seconds_left) for link in links)
            found = await asyncio.gather(*replies, return_exceptions=True)
            told: dict[str, pb.ResetQualityResponse] = {}
            failed: dict[str, grpc.aio.AioRpcError] = {}
            for link, reply in zip(links, found, strict=True):
                if isinstance(reply, grpc.aio.AioRpcError):
                    failed[link.name] = reply
                elif isinstance(reply, BaseException):
                    raise reply
                else:
                    told[link.name] = read_message(pb.ResetQualityResponse.FromString, reply)
            if failed:
                raise _not_reset(failed)
        stopped = {name: reply for name, reply in told.items() if reply.was_stopped}
        whole = pb.ResetQualityResponse(
            was_stopped=bool(stopped),
            since=min((reply.since for reply in stopped.values()), default=""),
            reason="; ".join(f"{name}: {reply.reason}" for name, reply in stopped.items()),
        )
        data: bytes = whole.SerializeToString()
        return data


def _not_reset(failed: Mapping[str, grpc.aio.AioRpcError]) -> grpc.aio.AioRpcError:
    """The first engine's error, in words that name them all."""
    first = next(iter(failed.values()))
    said = "; ".join(f"{name}: {error.code().name}: {error.details()}" for name, error in failed.items())
    gone = first.code() is grpc.StatusCode.CANCELLED
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE if gone else first.code(),
        first.initial_metadata(),
        first.trailing_metadata(),
        f"quality was not reset on every engine; {said}",
    )

"""A server that fails as it is told, and clients whose waiting takes no time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from blend_server.client import AsyncClient, Client
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc

LIMITS = pb.Limits(max_document_bytes=1000, max_message_bytes=1 << 20)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True)
class Fault:
    """How a call ends: a code, the server's hint in seconds, after how many events."""

    code: grpc.StatusCode
    hint: float | None = None
    after: int = 0

    def abort(self, context: grpc.ServicerContext) -> None:
        if self.hint is not None:
            retry, status = RetryInfo(), Status(code=self.code.value[0])
            retry.retry_delay.FromMilliseconds(round(self.hint * 1e3))
            status.details.add().Pack(retry)
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(self.code, "as told")


class Scripted(blend_pb2_grpc.BlendServiceServicer):
    """Ends each call as ``script`` says, by the rpc's name and in order; what nothing is said of succeeds."""

    def __init__(self) -> None:
        self.script: dict[str, deque[Fault]] = defaultdict(deque)
        self.calls: list[str] = []
        self.metadata: list[dict[str, Any]] = []
        self.left: list[float | None] = []
        self.received: list[list[str]] = []
        self.streams = threading.Semaphore(0)
        """Released at the beginning of each ingestion's stream."""

    def count(self, name: str) -> int:
        return self.calls.count(name)

    def _fault(self, name: str, context: grpc.ServicerContext) -> Fault | None:
        self.calls.append(name)
        self.metadata.append(dict(context.invocation_metadata()))
        self.left.append(context.time_remaining())
        return self.script[name].popleft() if self.script[name] else None

    def _unary(self, name: str, context: grpc.ServicerContext, reply: Any) -> Any:
        if (fault := self._fault(name, context)) is not None:
            fault.abort(context)
        return reply

    def GetStats(self, request: pb.GetStatsRequest, context: grpc.ServicerContext) -> pb.Stats:
        return self._unary("GetStats", context, pb.Stats(version="scripted", limits=LIMITS))

    def GetDocument(self, request: pb.GetDocumentRequest, context: grpc.ServicerContext) -> pb.DocumentInfo:
        return self._unary("GetDocument", context, pb.DocumentInfo(id=request.id))

    def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: grpc.ServicerContext
    ) -> pb.ListDocumentsResponse:
        reply = pb.ListDocumentsResponse(documents=[pb.DocumentInfo(id="a")])
        return self._unary("ListDocuments", context, reply)

    def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: grpc.ServicerContext
    ) -> pb.DeleteDocumentResponse:
        return self._unary("DeleteDocument", context, pb.DeleteDocumentResponse(dropped_chunks=3))

    def Retrieve(self, request: pb.RetrieveRequest, context: grpc.ServicerContext) -> pb.RetrieveResponse:
        return self._unary("Retrieve", context, pb.RetrieveResponse(passages=[pb.Passage(document_id="a")]))

    def Answer(self, request: pb.AnswerRequest, context: grpc.ServicerContext) -> Iterator[pb.AnswerEvent]:
        fault = self._fault("Answer", context)
        final = pb.FinalAnswer(text="yes", token_ids=[1], finish_reason=pb.FINISH_REASON_STOP)
        events = [
            pb.AnswerEvent(passages=pb.Passages()),
            pb.AnswerEvent(token=pb.Token(token_id=1, text="yes")),
            pb.AnswerEvent(answer=final),
        ]
        yield from events if fault is None else events[: fault.after]
        if fault is not None:
            fault.abort(context)

    def Ingest(
        self, request_iterator: Iterator[pb.Document], context: grpc.ServicerContext
    ) -> Iterator[pb.IngestProgress]:
        fault = self._fault("Ingest", context)
        received: list[str] = []
        self.received.append(received)
        self.streams.release()
        if fault is not None and fault.after == 0:
            fault.abort(context)
        for index, document in enumerate(request_iterator):
            received.append(document.id)
            stored = pb.IngestProgress.Stored(chunks=1)
            yield pb.IngestProgress(index=index, document_id=document.id, stored=stored)
            if fault is not None and index + 1 == fault.after:
                fault.abort(context)


class Serving:
    """The scripted server on a loopback port."""

    def __init__(self) -> None:
        self.told = Scripted()
        self._server = grpc.server(ThreadPoolExecutor(8))
        blend_pb2_grpc.add_BlendServiceServicer_to_server(self.told, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()


class Blocking:
    """A blocking client whose waits take no time."""

    def __init__(self, address: str, **options: Any) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.client: Any = self._client(address, **options)

    def _client(self, address: str, **options: Any) -> Any:
        return Client(address, clock=lambda: self.now, sleep=self._sleep, **options)

    def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def __call__(self, method: str, *arguments: Any, into: list[Any] | None = None, **options: Any) -> Any:
        """What a method returns, or all that it yields, which also goes ``into`` a list as it comes."""
        found = getattr(self.client, method)(*arguments, **options)
        if not inspect.isgenerator(found):
            return found
        seen = [] if into is None else into
        seen.extend(found)
        return seen

    def close(self) -> None:
        self.client.close()


class Awaiting(Blocking):
    """The same of an asynchronous client, in an event loop of its own."""

    def _client(self, address: str, **options: Any) -> Any:
        self._loop = asyncio.new_event_loop()

        async def sleep(seconds: float) -> None:
            self._sleep(seconds)

        return AsyncClient(address, clock=lambda: self.now, sleep=sleep, **options)

    def __call__(self, method: str, *arguments: Any, into: list[Any] | None = None, **options: Any) -> Any:
        async def run() -> Any:
            found = getattr(self.client, method)(*arguments, **options)
            if not inspect.isasyncgen(found):
                return await found
            seen = [] if into is None else into
            async for item in found:
                seen.append(item)
            return seen

        return self._loop.run_until_complete(run())

    def close(self) -> None:
        self._loop.run_until_complete(self.client.close())
        self._loop.close()

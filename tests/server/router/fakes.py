"""Engines without a model: they keep documents in a dictionary, and fail when they are told to."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from blend_server.hosting import SERVICE_NAME
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc

PATIENCE = 60.0


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` holds."""
    end = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < end, f"{what}: not within {PATIENCE} s"
        sleep(0.01)


def key_of(text: bytes) -> str:
    """A content key for a text."""
    return hashlib.blake2b(text, digest_size=20).hexdigest()


class FakeEngine(blend_pb2_grpc.BlendServiceServicer):
    """One engine; it can be stopped at once, and started again at the same address.

    Attributes:
        documents: title and text by id.
        calls: names of the rpcs that came, and their metadata.
        before: by rpc, what runs with the call's context before the engine does anything.
        during: by rpc, what runs when it has said something already.
        fails_with: the code of the last stage of every document, if any.
        tokens: texts of an answer's tokens.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.documents: dict[str, tuple[str, bytes]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.before: dict[str, Callable[[Any], None]] = {}
        self.during: dict[str, Callable[[Any], None]] = {}
        self.fails_with = ""
        self.tokens = ["one", "two"]
        self.sent = 0
        self.cancelled = threading.Event()
        self.credentials: grpc.ServerCredentials | None = None
        self._checks = health.HealthServicer()
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        blend_pb2_grpc.add_BlendServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self._checks = health.HealthServicer()
        self.serve(True)
        health_pb2_grpc.add_HealthServicer_to_server(self._checks, server)
        if self.credentials is None:
            self.port = server.add_insecure_port(self.address)
        else:
            self.port = server.add_secure_port(self.address, self.credentials)
        server.start()
        self._server = server

    def serve(self, serving: bool) -> None:
        """Have its health say whether it serves."""
        statuses = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}
        self._checks.set(SERVICE_NAME, statuses[serving])

    def stop(self) -> None:
        """Stop at once; what runs is cut off."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def asked(self, method: str) -> int:
        """How often an rpc came."""
        return sum(name == method for name, _ in self.calls)

    def texts(self) -> dict[str, bytes]:
        return {document_id: text for document_id, (_, text) in self.documents.items()}

    def _note(self, method: str, context: Any) -> None:
        sent = dict(context.invocation_metadata())
        self.calls.append((method, sent))
        context.send_initial_metadata((("x-request-id", sent.get("x-request-id", "none")),))
        context.set_trailing_metadata((("x-request-id", sent.get("x-request-id", "none")), ("served-by", self.name)))
        self.before.get(method, _nothing)(context)

    def Ingest(self, requests: Iterator[pb.Document], context: Any) -> Iterator[pb.IngestProgress]:
        self._note("Ingest", context)
        with suppress(grpc.RpcError):
            for document in requests:
                yield pb.IngestProgress(document_id=document.id, chunked=pb.IngestProgress.Chunked(chunks=1, tokens=3))
                self.during.get("Ingest", _nothing)(context)
                code = self.fails_with or ("" if document.content else "INVALID_ARGUMENT")
                if code:
                    failed = pb.IngestProgress.Failed(code=code, message=f"no room for {document.content!r}")
                    yield pb.IngestProgress(document_id=document.id, failed=failed)
                    continue
                new = (document.title, bytes(document.content))
                if self.documents.get(document.id) == new:
                    yield pb.IngestProgress(document_id=document.id, unchanged=pb.IngestProgress.Unchanged(chunks=1))
                    continue
                self.documents[document.id] = new
                yield pb.IngestProgress(document_id=document.id, stored=pb.IngestProgress.Stored(chunks=1))

    def DeleteDocument(self, request: pb.DeleteDocumentRequest, context: Any) -> pb.DeleteDocumentResponse:
        self._note("DeleteDocument", context)
        if self.documents.pop(request.id, None) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such document: {request.id!r}")
        return pb.DeleteDocumentResponse(dropped_chunks=1)

    def GetDocument(self, request: pb.GetDocumentRequest, context: Any) -> pb.DocumentInfo:
        self._note("GetDocument", context)
        if request.id not in self.documents:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such document: {request.id!r}")
        return self._info(request.id)

    def ListDocuments(self, request: pb.ListDocumentsRequest, context: Any) -> pb.ListDocumentsResponse:
        self._note("ListDocuments", context)
        ids = sorted(document_id for document_id in self.documents if document_id > request.page_token)
        page = ids[: request.page_size or 100]
        token = page[-1] if len(page) < len(ids) else ""
        return pb.ListDocumentsResponse(documents=map(self._info, page), next_page_token=token)

    def Retrieve(self, request: pb.RetrieveRequest, context: Any) -> pb.RetrieveResponse:
        self._note("Retrieve", context)
        return pb.RetrieveResponse(passages=self._passages())

    def Answer(self, request: pb.AnswerRequest, context: Any) -> Iterator[pb.AnswerEvent]:
        self._note("Answer", context)
        context.add_callback(self.cancelled.set)
        yield pb.AnswerEvent(passages=pb.Passages(passages=self._passages()))
        self.during.get("Answer", _nothing)(context)
        for text in self.tokens:
            self.sent += 1
            yield pb.AnswerEvent(token=pb.Token(text=text))
        yield pb.AnswerEvent(answer=pb.FinalAnswer(text="done", finish_reason=pb.FINISH_REASON_STOP))

    def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.Stats:
        self._note("GetStats", context)
        stats = pb.Stats(version="1", queue=pb.QueueStats(requests=1, max_queue=4))
        stats.corpus.documents = len(self.documents)
        stats.engine.requests = 5
        stats.engine.tiers.add(name="host", objects=2)
        stats.limits.max_document_bytes = stats.limits.max_message_bytes = 1 << 20
        stats.engine.details.update({"name": self.name})
        return stats

    def ResetQuality(self, request: pb.ResetQualityRequest, context: Any) -> pb.ResetQualityResponse:
        self._note("ResetQuality", context)
        return pb.ResetQualityResponse(was_stopped=True, since="2026-01-02T03:04:05+00:00", reason="too far off")

    def _info(self, document_id: str) -> pb.DocumentInfo:
        title, text = self.documents[document_id]
        return pb.DocumentInfo(id=document_id, title=title, chunks=1, sha256=hashlib.sha256(text).hexdigest())

    def _passages(self) -> list[pb.Passage]:
        found = sorted(self.documents.items())
        return [pb.Passage(document_id=name, text=text, key=key_of(text)) for name, (_, text) in found]


def _nothing(_: Any) -> None:
    """An engine that fails at nothing."""

"""The service as a Python object. Needs neither torch nor a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from blend.config import ServerConfig
from blend.types import Answer
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

TIMEOUT = 60.0
"""Seconds that a call may take where nothing else is said."""


class Client:
    """A connection to a server. Thread-safe; also a context manager.

    Every method raises :class:`ServiceError` where the server refuses or fails the call or cannot be reached, and
    :class:`~blend.errors.InvalidInput` for arguments that no message can hold. Calls that may be repeated are tried
    again as ``retries`` says: all of them but an answer of which something has been handed out.

    Args:
        address: ``host:port`` of the server.
        max_message_bytes: largest gRPC message to send or take; the server has a limit of its own.
        timeout: seconds that a call may take with all its tries, more than 0, at most a year; ingesting and answering
            may take longer.
        token: a bearer token, sent with each call; to another machine only with ``tls``.
        tls: encrypt the connection.
        retries: when a call that failed is tried again.
        clock, sleep: return the time in seconds, and wait for some; for tests.

    Raises:
        InvalidInput: the address, the timeout, the token or a file of ``tls`` cannot be used.
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
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.address = address
        self._timeout = check_timeout(timeout)
        self._retries = retries or Retries()
        self._clock, self._sleep = clock, sleep
        self._endpoint = Endpoint(address, max_message_bytes, token, tls)
        self._channel = self._endpoint.channel()
        self._stub: Any = BlendServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def ingest(self, documents: Iterable[Document]) -> Generator[pb.IngestProgress, None, None]:
        """Send documents; yields the progress of each, in order, as it is made.

        ``documents`` is iterated in another thread, as fast as the server takes them; what it raises is raised
        here after the progress of the documents before. A document that cannot be sent comes out as ``failed``
        like one that the server refuses. Closing the iterator drops the document at hand.

        Where the connection is lost, another try goes on with the documents that have not ended yet: their progress
        begins anew, and one that was stored before its last word came through ends as ``unchanged``. The policy
        counts afresh after every document that ends.
        """
        sender = _Sender(documents, self.stats().limits)
        attempts = Attempts(self._retries, None, self._clock)
        while True:
            stream = Try()
            call = self._stub.Ingest(sender.messages(stream), metadata=self._endpoint.metadata())
            try:
                for told in call:
                    if told.WhichOneof("stage") in ENDS:
                        attempts.progressed()
                    yield from sender.outbox.progress(stream, told)
                break
            except grpc.RpcError as error:
                pause = attempts.pause(error)
            finally:
                call.cancel()
            self._sleep(pause)
        yield from sender.outbox.refused()
        if sender.error is not None:
            raise sender.error

    def answer(
        self, question: str, *, timeout: float | None = None, **options: Unpack[AnswerOptions]
    ) -> Generator[AnswerEvent, None, None]:
        """Ask; yields the prompt's passages, then each token, then the answer with its report.

        Closing the iterator ends the generation.

        Args:
            question: the question.
            timeout: seconds until the answer ends however far it has come, with the finish reason ``deadline``;
                where not even its first token would come by then, the call fails (``DEADLINE_EXCEEDED``).
            options: see :class:`~blend_server.client.messages.AnswerOptions`.
        """
        request = answer_request(question, **options)
        attempts = Attempts(self._retries, None if timeout is None else check_timeout(timeout), self._clock)
        while True:
            handed_out = False
            call = self._stub.Answer(request, timeout=attempts.left(), metadata=self._endpoint.metadata())
            try:
                for event in call:
                    handed_out = True
                    yield answer_event(event)
                return
            except grpc.RpcError as error:
                if handed_out:
                    raise service_error(error) from error
                pause = attempts.pause(error)
            finally:
                call.cancel()
            self._sleep(pause)

    def ask(self, question: str, *, timeout: float | None = None, **options: Unpack[AnswerOptions]) -> Answer:
        """Ask and wait for the answer; see :meth:`answer`."""
        # To the end: a call that is left before it counts as cancelled.
        return last_answer(list(self.answer(question, timeout=timeout, **options)))

    def retrieve(self, question: str, k: int | None = None) -> list[pb.Passage]:
        """Return the passages that fit a question best, best first."""
        reply = self._unary(self._stub.Retrieve, build(pb.RetrieveRequest, question=question, k=k))
        return list(reply.passages)

    def documents(self, page_size: int | None = None) -> Generator[pb.DocumentInfo, None, None]:
        """Yield all documents by id, fetched in pages."""
        token = ""
        while True:
            request = build(pb.ListDocumentsRequest, page_size=page_size, page_token=token)
            reply = self._unary(self._stub.ListDocuments, request)
            yield from reply.documents
            if not (token := reply.next_page_token):
                return

    def get(self, document_id: str) -> pb.DocumentInfo:
        """Return one document."""
        reply: pb.DocumentInfo = self._unary(self._stub.GetDocument, build(pb.GetDocumentRequest, id=document_id))
        return reply

    def delete(self, document_id: str) -> int:
        """Delete a document; returns how many chunks went with it.

        That is 0 where the document was not there any more after a try that failed: then that one may have deleted it.
        """
        request, gone = build(pb.DeleteDocumentRequest, id=document_id), pb.DeleteDocumentResponse()
        return int(self._unary(self._stub.DeleteDocument, request, gone).dropped_chunks)

    def stats(self) -> pb.Stats:
        """Return the server's figures and limits."""
        reply: pb.Stats = self._unary(self._stub.GetStats, pb.GetStatsRequest())
        return reply

    def reset_quality(self) -> pb.ResetQualityResponse:
        """Let ``auto`` blend again after its quality stopped it; returns whether it was, since when, and why."""
        reply: pb.ResetQualityResponse = self._unary(self._stub.ResetQuality, pb.ResetQualityRequest())
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Callable[..., Any], request: object, gone: object = None) -> Any:
        """Call until it succeeds or is not to be tried again.

        ``gone`` is the reply where a try that failed may have removed what the next one does not find.
        """
        attempts = Attempts(self._retries, self._timeout, self._clock)
        while True:
            try:
                return method(request, timeout=attempts.left(), metadata=self._endpoint.metadata())
            except grpc.RpcError as error:
                if gone is not None and attempts.done_before(error):
                    return gone
                pause = attempts.pause(error)
            self._sleep(pause)


class _Sender:
    """The request side of one ingestion, through all its tries.

    A stream's documents are drawn in a thread of gRPC's, which may still wait for the caller's next document when its
    try has failed: what it draws then is left to the next one.
    """

    def __init__(self, documents: Iterable[Document], limits: pb.Limits) -> None:
        self.outbox = Outbox(limits)
        self.error: Exception | None = None
        self._documents = iter(documents)
        self._drawing = threading.Lock()

    def messages(self, stream: Try) -> Iterator[pb.Document]:
        """Yield a try's documents: those without an answer, then the caller's next ones."""
        while (sent := self.outbox.after(stream.last) or self._next(stream.last)) is not None:
            stream.places.append(sent.place)
            yield sent.message

    def _next(self, last: int) -> Sent | None:
        with self._drawing:
            try:
                while (sent := self.outbox.after(last)) is None:
                    self.outbox.put(next(self._documents))
            except StopIteration:
                return None
            except Exception as error:  # noqa: BLE001
                # Handed to whoever reads the progress: gRPC, in whose thread this runs, would hide it.
                self.error = error
                return None
            return sent

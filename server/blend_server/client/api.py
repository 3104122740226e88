"""The service as a Python object. Needs neither torch nor a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus

from blend.config import ServerConfig
from blend.errors import BlendError, InvalidDocument, InvalidInput
from blend.types import Answer, Plan, Sampling, Token
from blend_server import convert
from blend_server.client import credentials
from blend_server.client.credentials import Tls
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub

_MAX_TIMEOUT = 365 * 86400.0

_M = TypeVar("_M", bound=Message)

AnswerEvent: TypeAlias = pb.Passages | Token | Answer

# Room for ids, titles and framing beside a document's content in one message.
_MESSAGE_OVERHEAD = 16 * 1024


class ServiceError(BlendError):
    """The service refused or failed a call, or could not be reached.

    ``code`` is the name of the gRPC status code, ``kind`` the server's error type (such as ``InvalidPlan``) and
    ``field`` the field to blame (both empty where unknown), ``request_id`` the call's id in the server's log, and
    ``retry_seconds`` is after how long the server thinks it worth while to try again, where it says so.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        kind: str = "",
        field: str = "",
        request_id: str = "",
        retry_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.kind = kind
        self.field = field
        self.request_id = request_id
        self.retry_seconds = retry_seconds
        super().__init__(message)


@dataclass(frozen=True)
class Document:
    """A document to ingest: text, or its UTF-8 bytes, under an id of the caller's choice."""

    id: str
    content: str | bytes
    title: str = ""


class Client:
    """A connection to a server. Thread-safe; also a context manager.

    Every method raises :class:`ServiceError` where the server refuses or fails the call or cannot be reached, and
    :class:`~blend.errors.InvalidInput` for arguments that no message can hold.

    Args:
        address: ``host:port`` of the server.
        max_message_bytes: largest gRPC message to send or take; the server has a limit of its own.
        timeout: seconds that a call may take, more than 0, at most a year; ingesting and answering may take longer.
        token: a bearer token, sent with each call; to another machine only with ``tls``.
        tls: encrypt the connection.

    Raises:
        InvalidInput: the address, the timeout, the token or a file of ``tls`` cannot be used.
    """

    def __init__(
        self,
        address: str = ServerConfig.address,
        *,
        max_message_bytes: int = ServerConfig.max_message_bytes,
        timeout: float = 60.0,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        if not address or not address.isprintable() or not address.isascii():
            raise InvalidInput("address", address, "host:port")
        if not 0 < timeout <= _MAX_TIMEOUT:
            raise InvalidInput("timeout", timeout, f"seconds, more than 0 and at most {_MAX_TIMEOUT:.0f}")
        self.address = address
        self._timeout = timeout
        options = [
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 60_000),  # find out that a server is gone while a call waits for it
            ("grpc.keepalive_timeout_ms", 20_000),
        ]
        self._channel = credentials.channel(address, options, token, tls)
        self._stub: Any = BlendServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def ingest(self, documents: Iterable[Document]) -> Iterator[pb.IngestProgress]:
        """Send documents; yields the progress of each, in order, as it is made.

        ``documents`` is iterated in another thread, as fast as the server takes them; what it raises is raised
        here after the progress of the documents before. A document that cannot be sent comes out as ``failed``
        like one that the server refuses. Closing the iterator drops the document at hand.
        """
        sender = _Sender(documents, self.stats().limits)
        call = self._stub.Ingest(iter(sender))
        with _translated():
            try:
                for progress in call:
                    progress.index = sender.places[progress.index]
                    yield from sender.take_refused()
                    yield progress
            finally:
                call.cancel()
        yield from sender.take_refused()
        if sender.error is not None:
            raise sender.error

    def answer(
        self,
        question: str,
        *,
        k: int | None = None,
        plan: Plan | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        compare_full: bool = False,
        positions: bool = False,
        passage_order_seed: int | None = None,
    ) -> Iterator[AnswerEvent]:
        """Ask; yields the prompt's passages, then each token, then the answer with its report.

        Closing the iterator ends the generation.

        Args:
            k: how many passages; ``None`` leaves it to the server.
            plan: how to prefill; ``None`` is method ``auto``.
            max_new_tokens: most tokens of the answer; ``None``: what ``sampling`` says, or without it the server.
            sampling: how tokens are chosen and when the answer ends; ``None`` is greedy.
            compare_full: also run a full prefill and report how far the answer is from it.
            positions: report the recomputed positions.
            passage_order_seed: put the passages in a random order that this determines, not best first.
        """
        chosen = {} if sampling is None else convert.sampling_to_proto(sampling)
        if max_new_tokens is not None:
            chosen["max_new_tokens"] = max_new_tokens
        request = _build(
            pb.AnswerRequest,
            question=question,
            k=k,
            plan=None if plan is None else convert.plan_to_proto(plan),
            **chosen,
            compare_full=compare_full,
            want_positions=positions,
            passage_order_seed=passage_order_seed,
        )
        call = self._stub.Answer(request)
        with _translated():
            try:
                for event in call:
                    yield _answer_event(event)
            finally:
                call.cancel()

    def ask(self, question: str, **options: Any) -> Answer:
        """Ask and wait for the answer; options are those of :meth:`answer`."""
        # To the end: a call that is left before it counts as cancelled.
        answers = [event for event in self.answer(question, **options) if isinstance(event, Answer)]
        if not answers:
            raise ServiceError("INTERNAL", "the server ended the stream without an answer")
        return answers[-1]

    def retrieve(self, question: str, k: int | None = None) -> list[pb.Passage]:
        """Return the passages that fit a question best, best first."""
        reply = self._unary(self._stub.Retrieve, _build(pb.RetrieveRequest, question=question, k=k))
        return list(reply.passages)

    def documents(self, page_size: int | None = None) -> Iterator[pb.DocumentInfo]:
        """Yield all documents by id, fetched in pages."""
        token = ""
        while True:
            request = _build(pb.ListDocumentsRequest, page_size=page_size, page_token=token)
            reply = self._unary(self._stub.ListDocuments, request)
            yield from reply.documents
            if not (token := reply.next_page_token):
                return

    def get(self, document_id: str) -> pb.DocumentInfo:
        """Return one document."""
        reply: pb.DocumentInfo = self._unary(self._stub.GetDocument, _build(pb.GetDocumentRequest, id=document_id))
        return reply

    def delete(self, document_id: str) -> int:
        """Delete a document; returns how many chunks went with it."""
        reply = self._unary(self._stub.DeleteDocument, _build(pb.DeleteDocumentRequest, id=document_id))
        return int(reply.dropped_chunks)

    def stats(self) -> pb.Stats:
        """Return the server's figures and limits."""
        reply: pb.Stats = self._unary(self._stub.GetStats, pb.GetStatsRequest())
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

    def _unary(self, method: Callable[..., Any], request: Message) -> Any:
        with _translated():
            return method(request, timeout=self._timeout)


class _Sender:
    """The request side of one ingestion. ``places`` maps the server's count of documents to the caller's."""

    def __init__(self, documents: Iterable[Document], limits: pb.Limits) -> None:
        self._documents = documents
        self._limits = limits
        self._refused: deque[pb.IngestProgress] = deque()
        self.places: list[int] = []
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[pb.Document]:
        try:
            for place, document in enumerate(self._documents):
                try:
                    message = self._message(document)
                except InvalidInput as error:
                    self._refused.append(_failed(place, document, error))
                    continue
                self.places.append(place)
                yield message
        except Exception as error:  # noqa: BLE001
            # Handed to whoever reads the progress: gRPC, in whose thread this runs, would hide it.
            self.error = error

    def _message(self, document: Document) -> pb.Document:
        content = document.content
        if isinstance(content, str):
            try:
                content = content.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidDocument("content", content[error.start], "text without lone surrogates") from error
        limit = min(self._limits.max_document_bytes, self._limits.max_message_bytes - _MESSAGE_OVERHEAD)
        if len(content) > limit:
            raise InvalidDocument("content", f"{len(content)} bytes", f"at most {limit} bytes (split the document)")
        return _build(pb.Document, id=document.id, title=document.title, content=content)

    def take_refused(self) -> Iterator[pb.IngestProgress]:
        """Yield the documents that were not sent, once each."""
        while self._refused:
            yield self._refused.popleft()


def _failed(place: int, document: Document, error: BlendError) -> pb.IngestProgress:
    failed = pb.IngestProgress.Failed(code=grpc.StatusCode.INVALID_ARGUMENT.name, message=str(error))
    shown = document.id.encode("utf-8", "replace").decode("utf-8")
    return pb.IngestProgress(index=place, document_id=shown, failed=failed)


def _build(kind: type[_M], **fields: Any) -> _M:
    """A message with those fields that are not ``None``.

    Raises:
        InvalidInput: a value does not fit its field: a number of more bits, text that is not Unicode.
    """
    message: _M = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            if isinstance(value, Message):
                getattr(message, name).CopyFrom(value)
            elif isinstance(value, tuple):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(name, value, f"what the protocol can carry ({error})") from error
    return message


def _answer_event(event: pb.AnswerEvent) -> AnswerEvent:
    kind = event.WhichOneof("event")
    if kind == "passages":
        return event.passages
    return convert.token_from_proto(event.token) if kind == "token" else convert.answer_from_proto(event.answer)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn gRPC's errors into :class:`ServiceError`."""
    try:
        yield
    except grpc.RpcError as error:
        metadata = dict(error.trailing_metadata() or ())
        raise ServiceError(
            error.code().name,
            error.details() or error.code().name,
            kind=metadata.get("blend-error", ""),
            field=metadata.get("blend-field", ""),
            request_id=metadata.get("x-request-id", ""),
            retry_seconds=_retry_seconds(metadata.get("grpc-status-details-bin")),
        ) from error


def _retry_seconds(details: bytes | None) -> float | None:
    """What a ``google.rpc.Status`` says of trying again."""
    status, retry = RpcStatus(), RetryInfo()
    try:
        status.ParseFromString(details or b"")
        found = any(detail.Unpack(retry) for detail in status.details)
    except DecodeError:  # another server's, on the way
        return None
    return float(retry.retry_delay.ToMilliseconds() / 1e3) if found else None

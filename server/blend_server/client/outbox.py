"""The documents of one ingestion that were sent and not answered yet, so that another try can begin with them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from blend.errors import BlendError, InvalidDocument, InvalidInput
from blend_server.client.messages import Document, build
from blend_server.proto.blend.v1 import blend_pb2 as pb

ENDS = ("stored", "unchanged", "failed")
"""The last stages of a document's progress."""

# Room for ids, titles and framing beside a document's content in one message.
_MESSAGE_OVERHEAD = 16 * 1024


@dataclass(frozen=True)
class Sent:
    """A document on its way: its place among the caller's, and the message."""

    place: int
    message: pb.Document


@dataclass
class Try:
    """One stream of an ingestion: what was sent on it, by the server's count, and how far that is."""

    places: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The place of the document that was sent last, -1 before the first."""
        return self.places[-1] if self.places else -1


class Outbox:
    """What is sent, answered, and refused before it is sent. Any thread may use it.

    It holds no more documents than the connection takes ahead of the server's answers.
    """

    def __init__(self, limits: pb.Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._drawn = 0
        self._waiting: dict[int, Sent] = {}
        self._refused: deque[pb.IngestProgress] = deque()

    def put(self, document: Document) -> bool:
        """Take the caller's next document; returns whether it can be sent."""
        place, self._drawn = self._drawn, self._drawn + 1
        try:
            message = self._message(document)
        except InvalidInput as error:
            self._refused.append(_failed(place, document, error))
            return False
        with self._lock:
            self._waiting[place] = Sent(place, message)
        return True

    def after(self, place: int) -> Sent | None:
        """Return the first document behind ``place`` that was taken and has no answer yet."""
        with self._lock:
            if place + 1 == self._drawn:
                return None
            return next((sent for sent in self._waiting.values() if sent.place > place), None)

    def progress(self, stream: Try, told: pb.IngestProgress) -> Iterator[pb.IngestProgress]:
        """Yield what a try's stream tells, under the caller's count, behind the documents that were refused here."""
        told.index = stream.places[told.index]
        if told.WhichOneof("stage") in ENDS:
            with self._lock:
                self._waiting.pop(told.index, None)
        yield from self.refused()
        yield told

    def refused(self) -> Iterator[pb.IngestProgress]:
        """Yield the documents that cannot be sent, once each."""
        while self._refused:
            yield self._refused.popleft()

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
        return build(pb.Document, id=document.id, title=document.title, content=content)


def _failed(place: int, document: Document, error: BlendError) -> pb.IngestProgress:
    failed = pb.IngestProgress.Failed(code=grpc.StatusCode.INVALID_ARGUMENT.name, message=str(error))
    shown = document.id.encode("utf-8", "replace").decode("utf-8")
    return pb.IngestProgress(index=place, document_id=shown, failed=failed)

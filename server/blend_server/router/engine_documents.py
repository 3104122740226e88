"""What the router asks one engine about documents: to take a change, and what it holds; and what its errors mean."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from blend.errors import BlendError
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.router.calls import NoEngine
from blend_server.router.journal import Change, Held
from blend_server.router.link import Link, Metadata

logger = logging.getLogger("blend_server.router")

_SECONDS = 30.0
"""For calls that only read the catalog, or delete."""
_PAGE_SIZE = 1000
_LAST = ("stored", "unchanged", "failed")
_REFUSED = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"})
"""Codes of a ``failed`` stage that says something of the document; others say something of the engine."""


_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class NotTaken(NoEngine):
    """An engine did not take a document that it was given. ``code`` is why; the message may quote the document."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Outcome:
    """What came of a change on one engine.

    Args:
        progress: the last stage of a document that was to be taken.
        deleted: the reply where it was to be deleted.
        absent: the error instead of a reply where there was nothing to delete.
        held: what the engine holds of the document now; ``None``: nothing.
    """

    progress: pb.IngestProgress = field(default_factory=pb.IngestProgress)
    deleted: bytes = b""
    absent: grpc.aio.AioRpcError | None = None
    held: Held | None = None

    @property
    def taken(self) -> bool:
        """Whether the engine is now as if it had done what it was told; else it has refused."""
        return not self.progress.HasField("failed")


async def apply(link: Link, change: Change, metadata: Metadata, told: Callable[[pb.IngestProgress], None]) -> Outcome:
    """Have an engine take or delete a document; ``told`` gets the progress but for the last stage.

    Raises:
        AioRpcError: the call failed; codes of refusals mean that nothing has changed, others that nobody knows.
        NoEngine: the engine did not say what has come of it, or (``NotTaken``) that it has failed, which another one
            need not do.
    """
    if change.document is None:
        request = pb.DeleteDocumentRequest(id=change.id).SerializeToString()
        try:
            return Outcome(deleted=await link.unary("DeleteDocument", request, metadata, _SECONDS))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return Outcome(absent=error)
    last = None
    async with aclosing(link.ingest(change.document, metadata)) as stages:
        async for stage in stages:
            if stage.WhichOneof("stage") in _LAST:
                last = stage
            else:
                told(stage)
    if last is None:
        raise NoEngine(f"engine {link.name} did not say what has come of document {change.id!r}")
    if last.WhichOneof("stage") == "failed":
        if last.failed.code in _REFUSED:
            return Outcome(last)
        said = f"engine {link.name} failed at document {change.id!r}: {last.failed.code}: {last.failed.message}"
        raise NotTaken(said, last.failed.code)
    return Outcome(last, held=await _stored(link, change.id, metadata))


async def _stored(link: Link, document_id: str, metadata: Metadata) -> Held:
    """What an engine has made of a document that it has taken: it decides how text and title look from then on."""
    request = pb.GetDocumentRequest(id=document_id).SerializeToString()
    try:
        return _held(pb.DocumentInfo.FromString(await link.unary("GetDocument", request, metadata, _SECONDS)))
    except grpc.aio.AioRpcError as error:
        said = f"engine {link.name} took document {document_id!r}, and then: {error.code().name}: {error.details()}"
        raise NotTaken(said, error.code().name) from error


async def listed(link: Link, metadata: Metadata) -> dict[str, Held]:
    """Return what an engine holds, by the documents' ids.

    Raises:
        AioRpcError: it could not be asked.
    """
    found: dict[str, Held] = {}
    token = ""
    while True:
        request = pb.ListDocumentsRequest(page_size=_PAGE_SIZE, page_token=token).SerializeToString()
        page = pb.ListDocumentsResponse.FromString(await link.unary("ListDocuments", request, metadata, _SECONDS))
        found.update((info.id, _held(info)) for info in page.documents)
        if not (token := page.next_page_token):
            return found


def _held(info: pb.DocumentInfo) -> Held:
    return Held(info.title, info.sha256)


def is_refusal(error: Exception) -> bool:
    """Whether an engine that ended a call with this error has not taken a change; after others it may have."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS


def fell_behind(link: Link, owner: str, error: Exception | None, document_id: str | None) -> None:
    """Have an engine asked no more about an owner's documents, and say why, until it has caught up.

    Args:
        link: the engine.
        owner: whose documents.
        error: why.
        document_id: what it was given, if anything.
    """
    why = said(error)
    if link.behind.get(owner) != why:
        about = "" if document_id is None else f" document={document_id!r}"
        logger.warning("event=behind engine=%s tenant=%s%s reason=%s", link.name, owner, about, _logged(error))
    link.current.discard(owner)
    link.behind[owner] = why


def said(error: Exception | None) -> str:
    """An error in words for callers of the tenant: an engine's own, which may quote a document, included."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) if isinstance(error, BlendError) else type(error).__name__


def _logged(error: Exception | None) -> str:
    """An error in words for the log: of what an engine said, the code alone."""
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.code().name)
    return error.code if isinstance(error, NotTaken) else said(error)

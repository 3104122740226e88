"""What the catalog takes and gives."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.errors import InvalidInput
from blend.rag.protocols import Vectors
from blend.types import Chunk


@dataclass(frozen=True)
class NewChunk:
    """A chunk that is to be stored. ``embedding`` is ``[d]`` float32; the span is in characters of the document."""

    text: str
    token_ids: tuple[int, ...]
    content_key: str
    embedding: Vectors = field(repr=False, compare=False)
    start_char: int
    end_char: int


@dataclass(frozen=True)
class NewDocument:
    """A document that is to be stored.

    ``pipeline`` names everything that turned the text into chunks and vectors (chunker, tokenizer, embedding
    model); ``digest`` names that and the content.
    """

    id: str
    title: str
    text: str
    digest: str
    pipeline: str


@dataclass(frozen=True)
class DocumentInfo:
    """A stored document without its text.

    ``sha256`` is of the text, ``nbytes`` counts its UTF-8 bytes, ``created`` and ``updated`` are seconds since
    1970, ``chunks`` counts its chunks.
    """

    id: str
    title: str
    sha256: str
    digest: str
    pipeline: str
    nbytes: int
    chunks: int
    created: float
    updated: float


@dataclass(frozen=True)
class Document(DocumentInfo):
    """A stored document."""

    text: str = ""


@dataclass(frozen=True)
class Page:
    """Some documents in the order of their ids. ``next_page_token`` is empty on the last page."""

    documents: tuple[DocumentInfo, ...]
    next_page_token: str


@dataclass(frozen=True)
class ChunkRow:
    """A stored chunk. ``row_id`` is never given to another chunk; ``ordinal`` counts within the document from 0."""

    row_id: int
    document_id: str
    title: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    content_key: str
    start_char: int
    end_char: int


@dataclass(frozen=True)
class Orphan:
    """A content key that no stored chunk refers to, and the chunk it is of: its KV is to be forgotten.

    ``ticket`` tells one time that it was noted from the next.
    """

    content_key: str
    chunk: Chunk
    ticket: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Counts:
    """Figures of one namespace: documents, their bytes of UTF-8, chunks, and tokens in chunks."""

    documents: int
    nbytes: int
    chunks: int
    tokens: int


class Head(NamedTuple):
    """A state of the catalog: its generation and a random stamp that tells it from the same count of another past."""

    generation: int
    stamp: str


class Changes(NamedTuple):
    """Row ids of chunks that were added and removed up to ``head``; a row that came and went is only in ``removed``."""

    head: Head
    added: tuple[int, ...]
    removed: tuple[int, ...]


class Embeddings(NamedTuple):
    """``vectors[i]`` (``[n, d]`` float32) belongs to the chunk with row id ``rows[i]`` (``[n]`` int64, rising)."""

    rows: NDArray[np.int64]
    vectors: Vectors


def token_ids_of(blob: bytes) -> tuple[int, ...]:
    """Token ids from how they are stored: 32 bits each, little-endian."""
    return tuple(np.frombuffer(blob, dtype="<u4").tolist())


def token_ids_stored(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are stored."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


_PAGE = "after:"


def page_token_after(document_id: str) -> str:
    """The token of the page that follows a document."""
    return base64.urlsafe_b64encode(f"{_PAGE}{document_id}".encode()).decode("ascii")


def page_start(page_token: str) -> str:
    """The id after which a page starts; empty for the first page, whose token is empty.

    Raises:
        InvalidInput: the token is not one that a page gave.
    """
    if page_token == "":
        return ""
    try:
        text = base64.b64decode(page_token, altchars=b"-_", validate=True).decode("utf-8")
    except (ValueError, TypeError, binascii.Error) as error:
        raise InvalidInput("page_token", page_token, "empty, or the token of a page before") from error
    if not text.startswith(_PAGE):
        raise InvalidInput("page_token", page_token, "empty, or the token of a page before")
    return text.removeprefix(_PAGE)

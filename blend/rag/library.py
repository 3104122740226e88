"""Documents in, passages out: the catalog, its index and the embedding model behind one door."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from blend.config import RagConfig
from blend.errors import InvalidInput, TierUnavailable
from blend.rag.catalog import DEFAULT_PAGE_SIZE, Catalog
from blend.rag.chunking import Chunker, Piece, render_chunk
from blend.rag.documents import validate_document, validate_id
from blend.rag.index import Index
from blend.rag.neighbours import Neighbours
from blend.rag.prompt import check_question
from blend.rag.protocols import Embedder, Tokenizer, Vectors
from blend.rag.records import ChunkRow, Document, NewChunk, NewDocument, Orphan, Page
from blend.types import Chunk

_LOG = logging.getLogger(__name__)

# Changed rows after which the index is saved; a crash costs replaying at most these.
_SAVE_EVERY = 4096
_EMBED_AT_ONCE = 64
_ATTEMPTS = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prepared:
    """A document on its way in.

    ``unchanged``: the same document was processed in the same way already, and there is nothing to do.
    ``renews`` is the digest of the stored document that this one is the same text of, processed anew.
    ``embeddings`` (``[n, d]``, one for each piece) are there after :meth:`Library.embed`.
    """

    document: NewDocument
    pieces: tuple[Piece, ...]
    unchanged: bool
    renews: str | None = None
    embeddings: Vectors | None = field(default=None, repr=False, compare=False)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The pieces as chunks, in order."""
        return tuple(Chunk(piece.token_ids) for piece in self.pieces)


@dataclass(frozen=True)
class Passage:
    """A retrieved chunk. ``score`` is the cosine of its and the question's embedding, ``ordinal`` counts from 0."""

    row_id: int
    document_id: str
    title: str
    text: str
    score: float
    chunk: Chunk
    ordinal: int
    content_key: str


@dataclass(frozen=True)
class LibraryStats:
    """Figures of a library.

    ``nbytes``: the documents' UTF-8 bytes. ``tokens``: in all chunks. ``outdated``: documents that are left out of
    answers until they are processed again. ``indexed``: chunks that can be retrieved. ``generation``: rises with
    every change.
    """

    documents: int
    nbytes: int
    chunks: int
    tokens: int
    outdated: int
    indexed: int
    generation: int


class Library:
    """The documents of one namespace. All methods may be called from any thread.

    A document comes in by steps, so that each can be reported and the KV is there before the document is::

        prepared = library.prepare("guide", "A guide", text)
        prepared = library.embed(prepared)
        keys = [engine.content_key(chunk) for chunk in prepared.chunks]
        library.announce(prepared, keys)
        engine.precompute(prepared.chunks)
        library.commit(prepared, keys)

    KV that no document refers to is listed by :meth:`pending_forget` until somebody has forgotten it, whether its
    document went, was replaced, or never came to be::

        orphans = library.pending_forget()
        engine.forget_keys(orphan.content_key for orphan in orphans)
        library.forgotten(orphans)

    Documents that were processed with another tokenizer, embedding model or chunk size stay listed, but are not
    retrieved, for their token ids mean nothing to this model: see :meth:`outdated`. Their text is kept, so that they
    come in again by the same steps, from :meth:`prepare_again` on.

    Args:
        directory: holds the catalog and the index; made where there is none.
        config: chunk size, largest document, passages of an answer.
        tokenizer: the model's.
        embedder: the embedding model.
        namespace: the tenant, 1 to 256 printable characters.

    Attributes:
        neighbours: which of its chunks are near to each other.

    Raises:
        TierUnavailable, ObjectCorrupt: the catalog cannot be used. A damaged index is made anew.
        ModelError: the embedding model cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        config: RagConfig,
        tokenizer: Tokenizer,
        embedder: Embedder,
        namespace: str = "default",
    ) -> None:
        self.config = config
        self.namespace = validate_id(namespace)
        self._embedder = embedder
        self._lock = threading.Lock()
        self._closed = False
        self._chunker = Chunker(tokenizer.encode, config.chunk_tokens)
        self._pipeline = _digest(self._chunker.settings, tokenizer.digest, embedder.digest)
        root = Path(directory).expanduser()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TierUnavailable(f"the directory {root} cannot be made: {error}") from error
        self._catalog = Catalog(root / "catalog.sqlite3", namespace)
        try:
            self._index = Index(root / f"index-{_digest(namespace)[:16]}.bin", self._pipeline)
            self._index.catch_up(self._catalog)
        except BaseException:
            self._catalog.close()
            raise
        self.neighbours = Neighbours(self._catalog, self._index)

    # Documents in

    def prepare(self, document_id: str, title: str | None, text: str | bytes) -> Prepared:
        """Check a document and cut it into pieces; one that is there unchanged gives its stored pieces.

        Raises:
            InvalidDocument: see :func:`blend.rag.documents.validate_document`.
        """
        source = validate_document(document_id, title, text, self.config)
        digest = _digest(source.title, source.text, self._pipeline)
        document = NewDocument(source.id, source.title, source.text, digest, self._pipeline)
        stored = self._catalog.find(source.id)
        if stored is not None and stored.digest == digest:
            rows = self._catalog.chunks_of(source.id)
            pieces = tuple(Piece(row.text, row.token_ids, row.start_char, row.end_char) for row in rows)
            return Prepared(document, pieces, unchanged=True)
        return Prepared(document, tuple(self._chunker.chunks(source.text, source.title)), unchanged=False)

    def prepare_again(self, document_id: str) -> Prepared | None:
        """Cut a stored document into pieces as it would be now; ``None`` where it is gone.

        :meth:`commit` leaves the stored one alone if it has been replaced or deleted by then.

        Raises:
            InvalidDocument: it would not be taken with the present settings.
        """
        stored = self._catalog.find(document_id)
        if stored is None:
            return None
        return replace(self.prepare(stored.id, stored.title, stored.text), renews=stored.digest)

    def embed(self, prepared: Prepared, progress: Progress | None = None) -> Prepared:
        """Return ``prepared`` with the embeddings of its pieces, title included; ``progress(done, of)`` is called.

        Raises:
            ModelError: the embedding model cannot be used.
        """
        if prepared.unchanged:
            return prepared
        title = prepared.document.title
        texts = [render_chunk(title, piece.text).strip() for piece in prepared.pieces]
        parts = []
        for start in range(0, len(texts), _EMBED_AT_ONCE):
            parts.append(self._embedder.embed(texts[start : start + _EMBED_AT_ONCE]))
            if progress is not None:
                progress(min(start + _EMBED_AT_ONCE, len(texts)), len(texts))
        return replace(prepared, embeddings=np.concatenate(parts))

    def announce(self, prepared: Prepared, keys: Sequence[str]) -> None:
        """Note that KV is about to be made for these pieces: unless they are committed, it is to be forgotten.

        Raises:
            InvalidInput: not one key for each piece.
        """
        _check_keys(prepared, keys)
        self._catalog.note_pending({key: p.token_ids for key, p in zip(keys, prepared.pieces, strict=True)})

    def commit(self, prepared: Prepared, keys: Sequence[str]) -> tuple[Orphan, ...]:
        """Store a document in place of what had its id; return the chunks that are of no use any more.

        An unchanged document only gets its chunks' new keys, where the model gives them others than before.

        Args:
            prepared: what :meth:`embed` returned.
            keys: the content key of each piece, as the engine gave it.

        Raises:
            InvalidInput: there are no embeddings yet, or not one key for each piece.
        """
        _check_keys(prepared, keys)
        pieces, vectors = prepared.pieces, prepared.embeddings
        if prepared.unchanged:
            document = prepared.document
            known = [row.content_key for row in self._catalog.chunks_of(document.id)]
            return () if known == list(keys) else self._catalog.rekey(document.id, document.digest, keys)
        if vectors is None or len(vectors) != len(pieces):
            raise InvalidInput("prepared", prepared.document.id, "a document whose pieces were embedded")
        chunks = [
            NewChunk(piece.text, piece.token_ids, key, vector, piece.start_char, piece.end_char)
            for piece, key, vector in zip(pieces, keys, vectors, strict=True)
        ]
        orphans = self._catalog.replace(prepared.document, chunks, prepared.renews)
        self._follow()
        return orphans

    def delete(self, document_id: str) -> tuple[Orphan, ...]:
        """Remove a document; return the chunks that are of no use any more. It is gone before this returns.

        Raises:
            NotFound: there is no such document.
        """
        orphans = self._catalog.delete(document_id)
        self._follow()
        return orphans

    def pending_forget(self) -> tuple[Orphan, ...]:
        """Chunks that no document holds and whose KV was not yet forgotten, those being ingested among them."""
        return self._catalog.pending_forget()

    def forgotten(self, orphans: Iterable[Orphan]) -> None:
        """Take note that the KV of those chunks was forgotten."""
        self._catalog.forgotten(orphans)

    # Questions

    def retrieve(self, question: str, k: int | None = None) -> tuple[Passage, ...]:
        """The ``k`` passages (``config.top_k`` by default) closest to the question, best first; fewer if there are few.

        Raises:
            InvalidPrompt: the question is empty or no text.
            InvalidInput: ``k`` is below 1.
            ModelError: the embedding model cannot be used.
        """
        question = check_question(question)
        k = self.config.top_k if k is None else k
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise InvalidInput("k", k, "an integer of at least 1 (passages)")
        self._index.catch_up(self._catalog)
        if not len(self._index):
            return ()
        vector = self._embedder.embed([question])[0]
        passages: tuple[Passage, ...] = ()
        for _ in range(_ATTEMPTS):
            hits = self._index.search(vector, k)
            rows = self._catalog.chunks_by_row([row_id for row_id, _ in hits])
            scores = dict(hits)
            passages = tuple(_passage(row, scores[row.row_id]) for row in rows)
            if len(passages) == len(hits):
                break
            # A document went between the search and the look-up.
            self._index.catch_up(self._catalog)
        return passages

    # Views

    def get(self, document_id: str) -> Document:
        """The document of that id.

        Raises:
            NotFound: there is none.
        """
        return self._catalog.get(document_id)

    def chunks_of(self, document_id: str) -> tuple[ChunkRow, ...]:
        """The chunks of a document in order.

        Raises:
            NotFound: there is no such document.
        """
        rows = self._catalog.chunks_of(document_id)
        if not rows:
            self._catalog.get(document_id)
        return rows

    def references(self, content_key: str) -> int:
        """How many stored chunks, of any namespace of this directory, refer to that content key."""
        return self._catalog.references(content_key)

    def outdated(self) -> tuple[str, ...]:
        """Ids of documents that were processed in another way than now, and are not retrieved."""
        return self._catalog.outdated(self._pipeline)

    def to_renew(self, tag: str) -> tuple[str, ...]:
        """Ids of documents that :meth:`prepare_again` has something to do for.

        Those are the outdated ones, and those whose content keys are of another model or secret.

        Args:
            tag: what present content keys end with (:attr:`blend.store.key.Namespace.tag`).
        """
        return tuple(sorted({*self.outdated(), *self._catalog.of_other_models(tag)}))

    def list(self, page_size: int = DEFAULT_PAGE_SIZE, page_token: str = "") -> Page:
        """Documents without their text, in the order of their ids; see :meth:`blend.rag.catalog.Catalog.list`."""
        return self._catalog.list(page_size, page_token)

    def size(self, without: str = "") -> tuple[int, int]:
        """How many documents there are, and the bytes of their texts in UTF-8, leaving out the id ``without``."""
        return self._catalog.size(without)

    def stats(self) -> LibraryStats:
        """Figures of this library."""
        counts = self._catalog.counts()
        return LibraryStats(
            documents=counts.documents,
            nbytes=counts.nbytes,
            chunks=counts.chunks,
            tokens=counts.tokens,
            outdated=len(self.outdated()),
            indexed=len(self._index),
            generation=self._catalog.head().generation,
        )

    def close(self) -> None:
        """Save the index and close the files. Calling it again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._save()
                self._index.close()
                self._catalog.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self) -> None:
        """Bring the index up after a change. The change is committed, so no fault here may hide its outcome."""
        try:
            self._index.catch_up(self._catalog)
            if self._index.unsaved >= _SAVE_EVERY:
                self._save()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next question meets it, or it is mended by then
            _LOG.warning("event=index_behind error=%s", type(error).__name__)

    def _save(self) -> None:
        try:
            self._index.save()
        except TierUnavailable as error:
            _LOG.warning("%s; it will be made from the catalog", error)


def _digest(*parts: str) -> str:
    return hashlib.blake2b(json.dumps(parts).encode("utf-8"), digest_size=32).hexdigest()


def _check_keys(prepared: Prepared, keys: Sequence[str]) -> None:
    if len(keys) != len(prepared.pieces):
        raise InvalidInput("keys", f"{len(keys)} keys", f"one for each of {len(prepared.pieces)} pieces")


def _passage(row: ChunkRow, score: float) -> Passage:
    return Passage(
        row_id=row.row_id,
        document_id=row.document_id,
        title=row.title,
        text=row.text,
        score=score,
        chunk=Chunk(row.token_ids),
        ordinal=row.ordinal,
        content_key=row.content_key,
    )

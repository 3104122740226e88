"""The truth about documents, chunks and embeddings: one SQLite file.

Every change of a document raises a generation counter and logs which chunk rows came and went, so that an index can
follow, and notes which chunks' KV is to be forgotten (:mod:`blend.rag.pending`).
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from blend.database import transaction
from blend.errors import Closed, InvalidInput, NotFound
from blend.rag import changelog, pending
from blend.rag.records import (
    Changes,
    ChunkRow,
    Counts,
    Document,
    DocumentInfo,
    Embeddings,
    Head,
    NewChunk,
    NewDocument,
    Orphan,
    Page,
    page_start,
    page_token_after,
    token_ids_of,
    token_ids_stored,
)
from blend.rag.schema import prepare, typed_errors

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_BUSY_SECONDS = 30.0
_VARIABLES = 500  # SQLite refuses statements with too many
_INFO = (
    "d.id, d.title, d.sha256, d.digest, d.pipeline, d.nbytes, "
    "(SELECT COUNT(*) FROM chunks c WHERE c.document = d.row), d.created, d.updated"
)
_CHUNK = "c.row, d.id, d.title, c.ordinal, c.text, c.token_ids, c.content_key, c.start_char, c.end_char"

Removed = tuple[int, str, bytes]
"""Row id, content key and token ids of a chunk that was removed."""


class Catalog:
    """One namespace of a catalog file. All methods may be called from any thread; writes are all or nothing.

    Args:
        path: the file, created where there is none. Other namespaces and other processes may use it as well.
        namespace: the tenant whose documents these are.
        log_limit: how many changed chunks the log keeps; an index that is further behind is rebuilt.

    Raises:
        TierUnavailable: the file cannot be opened.
        ObjectCorrupt: it is not a catalog, is damaged, or was written by a newer version.
    """

    def __init__(self, path: Path, namespace: str = "default", *, log_limit: int = 100_000) -> None:
        self.path = path
        self.namespace = namespace
        self._log_limit = log_limit
        self._lock = threading.RLock()
        self._closed = False
        with typed_errors(path):
            # Transactions are begun by hand; the lock, not SQLite, keeps threads apart.
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                prepare(self._db, path)
                changelog.begin(self._db, namespace)
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            self._db.close()

    # Documents

    def find(self, document_id: str) -> Document | None:
        """The document of that id, or ``None``."""
        with self._reading() as db:
            row = db.execute(
                f"SELECT {_INFO}, d.text FROM documents d WHERE d.namespace = ? AND d.id = ?",
                (self.namespace, document_id),
            ).fetchone()
        return Document(*row) if row else None

    def get(self, document_id: str) -> Document:
        """The document of that id.

        Raises:
            NotFound: there is none.
        """
        found = self.find(document_id)
        if found is None:
            raise NotFound("document", document_id)
        return found

    def list(self, page_size: int = DEFAULT_PAGE_SIZE, page_token: str = "") -> Page:
        """Documents in the order of their ids, ``page_size`` (1 to 1000) at a time.

        Pages stay in step while documents come and go: a page holds the ids that follow the previous page's last.

        Raises:
            InvalidInput: the size is out of range, or the token is not one that a page gave.
        """
        if not isinstance(page_size, int) or isinstance(page_size, bool) or not 1 <= page_size <= MAX_PAGE_SIZE:
            raise InvalidInput("page_size", page_size, f"an integer from 1 to {MAX_PAGE_SIZE}")
        after = page_start(page_token)
        with self._reading() as db:
            rows = db.execute(
                f"SELECT {_INFO} FROM documents d WHERE d.namespace = ? AND d.id > ? ORDER BY d.id LIMIT ?",
                (self.namespace, after, page_size + 1),
            ).fetchall()
        infos = tuple(DocumentInfo(*row) for row in rows[:page_size])
        return Page(infos, page_token_after(infos[-1].id) if len(rows) > page_size else "")

    def outdated(self, pipeline: str) -> tuple[str, ...]:
        """Ids of documents that were processed by another pipeline, in order."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT id FROM documents WHERE namespace = ? AND pipeline <> ? ORDER BY id", (self.namespace, pipeline)
            ).fetchall()
        return tuple(row[0] for row in rows)

    def of_other_models(self, tag: str) -> tuple[str, ...]:
        """Ids of documents whose content keys do not end with the namespace tag ``tag``, in order."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT d.id FROM documents d JOIN chunks c ON c.document = d.row AND c.ordinal = 0 "
                "WHERE d.namespace = ? AND substr(c.content_key, ?) <> ? ORDER BY d.id",
                (self.namespace, -len(tag), tag),
            ).fetchall()
        return tuple(row[0] for row in rows)

    def size(self, without: str = "") -> tuple[int, int]:
        """How many documents there are, and the bytes of their texts in UTF-8, leaving out the id ``without``."""
        with self._reading() as db:
            documents, nbytes = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(nbytes), 0) FROM documents WHERE namespace = ? AND id <> ?",
                (self.namespace, without),
            ).fetchone()
        return documents, nbytes

    def counts(self) -> Counts:
        """Figures of this namespace."""
        with self._reading() as db:
            documents, nbytes = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(nbytes), 0) FROM documents WHERE namespace = ?", (self.namespace,)
            ).fetchone()
            chunks, stored = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(LENGTH(token_ids)), 0) FROM chunks WHERE document IN "
                "(SELECT row FROM documents WHERE namespace = ?)",
                (self.namespace,),
            ).fetchone()
        return Counts(documents, nbytes, chunks, stored // 4)

    # Changes

    def replace(
        self, document: NewDocument, chunks: Sequence[NewChunk], renews: str | None = None
    ) -> tuple[Orphan, ...]:
        """Store a document with its chunks in place of what had its id; return what became of no use by that.

        With ``renews`` only the stored document of that digest is replaced, and counts as last updated when it was
        before; nothing happens where it is gone, or has another digest by now.
        """
        now = time.time()
        data = document.text.encode("utf-8")
        with self._writing() as db:
            old = db.execute(
                "SELECT row, created, updated, digest FROM documents WHERE namespace = ? AND id = ?",
                (self.namespace, document.id),
            ).fetchone()
            if renews is not None and (old is None or old[3] != renews):
                return ()
            updated = now if renews is None else old[2]
            removed = self._remove(db, old[0]) if old else []
            cursor = db.execute(
                "INSERT INTO documents (namespace, id, title, sha256, digest, pipeline, nbytes, created, updated, text)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(self.namespace, document.id, document.title, hashlib.sha256(data).hexdigest()),
                    *(document.digest, document.pipeline, len(data), old[1] if old else now, updated, document.text),
                ),
            )
            row = cursor.lastrowid
            added = [_insert(db, row, ordinal, chunk) for ordinal, chunk in enumerate(chunks)]
            self._log(db, removed, added)
            pending.clear(db, (chunk.content_key for chunk in chunks))
            return pending.note(db, self.namespace, _by_key(removed))

    def delete(self, document_id: str) -> tuple[Orphan, ...]:
        """Remove a document with its chunks; return what became of no use by that.

        Raises:
            NotFound: there is no such document.
        """
        with self._writing() as db:
            row = db.execute(
                "SELECT row FROM documents WHERE namespace = ? AND id = ?", (self.namespace, document_id)
            ).fetchone()
            if row is None:
                raise NotFound("document", document_id)
            removed = self._remove(db, row[0])
            self._log(db, removed, [])
            return pending.note(db, self.namespace, _by_key(removed))

    def rekey(self, document_id: str, digest: str, keys: Sequence[str]) -> tuple[Orphan, ...]:
        """Give a document's chunks other content keys, in order; return what became of no use by that.

        Nothing happens where the document is gone, or has another ``digest`` by now. The chunks stay the same, so
        an index has nothing to follow.
        """
        with self._writing() as db:
            rows = db.execute(
                "SELECT c.row, c.content_key, c.token_ids FROM chunks c JOIN documents d ON d.row = c.document "
                "WHERE d.namespace = ? AND d.id = ? AND d.digest = ? ORDER BY c.ordinal",
                (self.namespace, document_id, digest),
            ).fetchall()
            if not rows:
                return ()
            pairs = [(key, row) for key, (row, _, _) in zip(keys, rows, strict=True)]
            db.executemany("UPDATE chunks SET content_key = ? WHERE row = ?", pairs)
            pending.clear(db, keys)
            return pending.note(db, self.namespace, _by_key(rows))

    # KV that is to be forgotten

    def note_pending(self, chunks: Mapping[str, Sequence[int]]) -> None:
        """Note content keys (with their token ids) that KV is about to be made for, unless a chunk refers to them."""
        with self._writing() as db:
            pending.note(db, self.namespace, {key: token_ids_stored(ids) for key, ids in chunks.items()})

    def pending_forget(self) -> tuple[Orphan, ...]:
        """Chunks of this namespace that no stored chunk refers to and whose KV was not yet forgotten, oldest first."""
        with self._reading() as db:
            return pending.listed(db, self.namespace)

    def forgotten(self, orphans: Iterable[Orphan]) -> None:
        """Take note that the KV of those was forgotten; what was noted again since stays."""
        with self._writing() as db:
            pending.drop(db, orphans)

    # Chunks

    def chunks_of(self, document_id: str) -> tuple[ChunkRow, ...]:
        """The chunks of a document in order; none where there is no such document."""
        with self._reading() as db:
            rows = db.execute(
                f"SELECT {_CHUNK} FROM chunks c JOIN documents d ON d.row = c.document "
                "WHERE d.namespace = ? AND d.id = ? ORDER BY c.ordinal",
                (self.namespace, document_id),
            ).fetchall()
        return tuple(_chunk_row(row) for row in rows)

    def chunks_by_row(self, row_ids: Sequence[int]) -> tuple[ChunkRow, ...]:
        """The chunks of those row ids, in that order; rows that are gone are left out."""
        found: dict[int, ChunkRow] = {}
        with self._reading() as db:
            for part in _parts(row_ids):
                rows = db.execute(
                    f"SELECT {_CHUNK} FROM chunks c JOIN documents d ON d.row = c.document "
                    f"WHERE d.namespace = ? AND c.row IN ({_marks(part)})",
                    (self.namespace, *part),
                )
                found.update((row[0], _chunk_row(row)) for row in rows)
        return tuple(found[row_id] for row_id in row_ids if row_id in found)

    def references(self, content_key: str) -> int:
        """How many stored chunks, of any namespace of this file, refer to that content key."""
        with self._reading() as db:
            row = db.execute("SELECT COUNT(*) FROM chunks WHERE content_key = ?", (content_key,)).fetchone()
        return int(row[0])

    def embeddings(self, pipeline: str, row_ids: Sequence[int]) -> Embeddings:
        """Vectors of those chunks; left out are chunks that are gone or were made by another pipeline."""
        found: list[tuple[int, bytes]] = []
        with self._reading() as db:
            for part in _parts(row_ids):
                found += db.execute(
                    "SELECT c.row, c.embedding FROM chunks c JOIN documents d ON d.row = c.document "
                    f"WHERE d.namespace = ? AND d.pipeline = ? AND c.row IN ({_marks(part)})",
                    (self.namespace, pipeline, *part),
                ).fetchall()
        return _embeddings(sorted(found))

    def all_embeddings(self, pipeline: str, batch: int = 4096) -> Iterator[Embeddings]:
        """Vectors of all chunks made by that pipeline, by rising row id, ``batch`` at a time.

        Changes made meanwhile may or may not be in it.
        """
        last = 0
        while True:
            with self._reading() as db:
                rows = db.execute(
                    "SELECT c.row, c.embedding FROM chunks c JOIN documents d ON d.row = c.document "
                    "WHERE c.row > ? AND d.namespace = ? AND d.pipeline = ? ORDER BY c.row LIMIT ?",
                    (last, self.namespace, pipeline, batch),
                ).fetchall()
            if not rows:
                return
            yield _embeddings(rows)
            last = rows[-1][0]

    # Generations

    def head(self) -> Head:
        """The present generation. It rises with every change of a document."""
        with self._reading() as db:
            return changelog.head(db, self.namespace)

    def changes_since(self, base: Head) -> Changes | None:
        """What changed from ``base`` to now; ``None`` if the log does not reach back, or knows another past."""
        with self._reading() as db:
            return changelog.since(db, self.namespace, base)

    @staticmethod
    def _remove(db: sqlite3.Connection, document_row: int) -> Sequence[Removed]:
        """Delete a document; return its chunks."""
        removed = db.execute(
            "SELECT row, content_key, token_ids FROM chunks WHERE document = ? ORDER BY ordinal", (document_row,)
        ).fetchall()
        db.execute("DELETE FROM documents WHERE row = ?", (document_row,))
        return removed

    def _log(self, db: sqlite3.Connection, removed: Sequence[Removed], added: Sequence[int]) -> None:
        changelog.append(db, self.namespace, [row_id for row_id, _, _ in removed], added, self._log_limit)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._transaction("BEGIN") as db:
            yield db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._transaction("BEGIN IMMEDIATE") as db:
            yield db

    @contextmanager
    def _transaction(self, begin: Literal["BEGIN", "BEGIN IMMEDIATE"]) -> Iterator[sqlite3.Connection]:
        with self._lock, typed_errors(self.path):
            if self._closed:
                raise Closed(f"the catalog {self.path} was closed")
            with transaction(self._db, begin) as db:
                yield db


def _insert(db: sqlite3.Connection, document_row: int | None, ordinal: int, chunk: NewChunk) -> int:
    cursor = db.execute(
        "INSERT INTO chunks (document, ordinal, text, token_ids, content_key, embedding, start_char, end_char) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(document_row, ordinal, chunk.text, token_ids_stored(chunk.token_ids)),
            *(chunk.content_key, np.asarray(chunk.embedding, dtype="<f4").tobytes(), chunk.start_char, chunk.end_char),
        ),
    )
    return int(cursor.lastrowid or 0)


def _by_key(removed: Iterable[Removed]) -> dict[str, bytes]:
    return {content_key: token_ids for _, content_key, token_ids in removed}


def _chunk_row(row: tuple[int, str, str, int, str, bytes, str, int, int]) -> ChunkRow:
    return ChunkRow(*row[:5], token_ids_of(row[5]), *row[6:])


def _embeddings(rows: Sequence[tuple[int, bytes]]) -> Embeddings:
    ids = np.asarray([row_id for row_id, _ in rows], dtype=np.int64)
    vectors = np.frombuffer(b"".join(blob for _, blob in rows), dtype="<f4")
    return Embeddings(ids, vectors.reshape(len(rows), -1) if rows else vectors.reshape(0, 0))


def _parts(row_ids: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(row_ids), _VARIABLES):
        yield [int(row_id) for row_id in row_ids[start : start + _VARIABLES]]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))

"""Nearest chunks by inner product. The index follows the catalog and can always be made from it again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from blend.errors import Closed, InvalidInput, TierUnavailable
from blend.rag import snapshot
from blend.rag.catalog import Catalog
from blend.rag.protocols import Vectors
from blend.rag.records import Embeddings, Head

_LOG = logging.getLogger(__name__)

# Scores of equal vectors may differ by rounding with their place in the index: what is this close to the last hit is
# scored again.
_ROUNDING = 1e-4
# Likewise where many are searched for at once, which takes no bound: so many beyond the last hit.
_SPARE = 8


class Index:
    """Vectors of one catalog's chunks, by row id. All methods may be called from any thread.

    The snapshot file only saves time: one that is missing, damaged, of another pipeline or of another past than
    the catalog's is left aside, and :meth:`catch_up` fills the index from the catalog.

    Args:
        path: the snapshot file; it need not exist.
        pipeline: names everything that decides on chunks and vectors; only chunks of this pipeline are held.
    """

    def __init__(self, path: Path, pipeline: str) -> None:
        self.path = path
        self.pipeline = pipeline
        self._lock = threading.RLock()
        self._closed = False
        self._head: Head | None = None
        self._saved: Head | None = None
        self._changed = 0
        self._rows: set[int] = set()
        self._faiss: faiss.IndexIDMap2 | None = None
        self._restore()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """The row ids, rising."""
        with self._lock:
            return tuple(sorted(self._rows))

    @property
    def unsaved(self) -> int:
        """How many rows were added or removed since the last snapshot."""
        return self._changed

    def catch_up(self, catalog: Catalog) -> None:
        """Bring the index to the catalog's present generation: from its change log, else from all its embeddings.

        Raises:
            TierUnavailable: the catalog cannot be read. The next call goes on; after any other fault, which may have
                left anything in the index, it begins anew.
        """
        with self._lock:
            self._check_open()
            try:
                self._catch_up(catalog)
            except TierUnavailable:
                raise
            except Exception:
                self._head = None
                raise

    def _catch_up(self, catalog: Catalog) -> None:
        while self._head != catalog.head():
            changes = catalog.changes_since(self._head) if self._head else None
            if changes is None:
                self._rebuild(catalog)
                continue
            # In this order, and each harmless when repeated: after a rebuild the log may tell what is known.
            self.remove(changes.removed)
            self.add(*catalog.embeddings(self.pipeline, changes.added))
            self._head = changes.head

    def add(self, rows: NDArray[np.int64], vectors: Vectors) -> None:
        """Add ``vectors`` (``[n, d]`` float32 of length 1) under row ids ``rows`` (``[n]``); known ids are passed over.

        Raises:
            InvalidInput: the shapes do not fit each other, or the vectors already there.
        """
        with self._lock:
            self._check_open()
            if vectors.ndim != 2 or len(rows) != len(vectors):
                raise InvalidInput("vectors", vectors.shape, f"one vector for each of {len(rows)} rows")
            new = np.asarray([int(row) not in self._rows for row in rows], dtype=bool)
            if not new.any():
                return
            index = self._faiss or faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            if index.d != vectors.shape[1]:
                raise InvalidInput("vectors", vectors.shape, f"vectors of {index.d} numbers")
            index.add_with_ids(np.ascontiguousarray(vectors[new], np.float32), np.asarray(rows[new], np.int64))
            self._faiss = index
            self._rows.update(int(row) for row in rows[new])
            self._changed += int(new.sum())

    def remove(self, rows: Iterable[int]) -> None:
        """Remove row ids; unknown ones are passed over."""
        with self._lock:
            self._check_open()
            known = [row for row in rows if row in self._rows]
            if known and self._faiss is not None:
                self._faiss.remove_ids(faiss.IDSelectorBatch(np.asarray(known, dtype=np.int64)))
                self._rows.difference_update(known)
                self._changed += len(known)

    def search(self, vector: Vectors, k: int) -> list[tuple[int, float]]:
        """The ``k`` rows (all, if there are fewer) with the largest inner product with ``vector`` (``[d]``).

        Best first; equal scores are in the order of row ids, whatever happened to the index before.

        Raises:
            InvalidInput: ``k`` is below 1, or the vector has another length than those in the index.
        """
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise InvalidInput("k", k, "an integer of at least 1 (passages)")
        with self._lock:
            self._check_open()
            index = self._faiss
            if index is None or not self._rows:
                return []
            query = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
            if query.shape[1] != index.d:
                raise InvalidInput("vector", query.shape, f"a vector of {index.d} numbers")
            if k >= len(self._rows):
                candidates = np.sort(np.fromiter(self._rows, np.int64, len(self._rows)))
            else:
                scores, _ = index.search(query, k)
                _, _, candidates = index.range_search(query, float(scores[0, -1]) - _ROUNDING)
            vectors = index.reconstruct_batch(candidates)
        # Row by row in the same order of additions, so that equal vectors get equal scores.
        exact = np.multiply(vectors, query, dtype=np.float64).sum(axis=1)
        best = np.lexsort((candidates, -exact))[:k]
        return [(int(candidates[i]), float(exact[i])) for i in best]

    def nearest(self, rows: Sequence[int], k: int) -> dict[int, list[int]]:
        """The ``k`` other rows (all, if there are fewer) with the largest inner product with each of ``rows``.

        Best first; equal scores are in the order of row ids, but for copies beyond the last hit. Rows that are not
        there are left out.
        """
        with self._lock:
            self._check_open()
            known = [row for row in rows if row in self._rows]
            index = self._faiss
            if index is None or not known:
                return {}
            queries = index.reconstruct_batch(np.asarray(known, dtype=np.int64))
            _, found = index.search(queries, min(k + 1 + _SPARE, len(self._rows)))
            vectors = index.reconstruct_batch(found.ravel()).reshape(*found.shape, -1)
        nearest = {}
        for row, query, candidates, theirs in zip(known, queries, found, vectors, strict=True):
            exact = np.multiply(theirs, query, dtype=np.float64).sum(axis=1)
            best = candidates[np.lexsort((candidates, -exact))]
            nearest[row] = [int(other) for other in best if other != row][:k]
        return nearest

    def save(self) -> None:
        """Write the snapshot, whole or not at all. Does nothing when it is up to date, or nothing is known yet.

        Raises:
            TierUnavailable: it cannot be written.
        """
        with self._lock:
            self._check_open()
            if self._head is None or self._head == self._saved:
                return
            snapshot.write(self.path, self.pipeline, self._head, self._contents())
            self._saved, self._changed = self._head, 0

    def close(self) -> None:
        """Drop the vectors, without saving. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            self._faiss = None
            self._rows = set()

    def _restore(self) -> None:
        try:
            found = snapshot.read(self.path, self.pipeline)
        except snapshot.Unusable as reason:
            _LOG.warning("the index %s is made anew from the catalog: %s", self.path, reason)
            return
        if found is not None:
            self._head, contents = found
            self.add(*contents)
            self._saved, self._changed = self._head, 0

    def _rebuild(self, catalog: Catalog) -> None:
        """Fill the index from the catalog. Its head is taken first: later changes come again from the log."""
        self._faiss, self._rows = None, set()
        head = catalog.head()
        for batch in catalog.all_embeddings(self.pipeline):
            self.add(*batch)
        self._head = head

    def _contents(self) -> Embeddings:
        rows = np.sort(np.fromiter(self._rows, np.int64, len(self._rows)))
        if self._faiss is None or not len(rows):
            return Embeddings(rows, np.empty((0, 0), dtype=np.float32))
        return Embeddings(rows, self._faiss.reconstruct_batch(rows))

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the index was closed")

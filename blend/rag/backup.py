"""Copies of catalogs that are in use, and the check of such a copy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from blend.errors import ObjectCorrupt
from blend.rag.schema import typed_errors, version_of

_BUSY_SECONDS = 30.0


@dataclass(frozen=True)
class CatalogSize:
    """How much a catalog holds. ``schema`` is the version of its tables, ``nbytes`` counts the texts' UTF-8 bytes."""

    schema: int
    documents: int
    chunks: int
    nbytes: int


def copy_catalog(source: Path, target: Path) -> CatalogSize | None:
    """Copy a catalog, as it is at one moment, to the new file ``target``, and check the copy.

    Others may read and write ``source`` meanwhile and are not kept waiting.

    Returns:
        what the copy holds; ``None``: the catalog is just being made, and nothing was copied.

    Raises:
        TierUnavailable: a file cannot be read or written.
        ObjectCorrupt: see :func:`check_catalog`.
    """
    with typed_errors(source), closing(_open(source, "rw")) as old:
        if version_of(old, source) == 0:
            return None
        with closing(sqlite3.connect(target, isolation_level=None)) as new:
            old.backup(new)
    return check_catalog(target)


def check_catalog(path: Path) -> CatalogSize:
    """Check a catalog that nobody uses, every page of it, and return what it holds.

    Raises:
        TierUnavailable: the file cannot be read.
        ObjectCorrupt: it is damaged, no catalog, of a newer version, or holds code that SQLite would run.
    """
    with _reading(path) as db:
        version = version_of(db, path)
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if version == 0 or found != "ok":
            raise ObjectCorrupt(f"the catalog {path} is damaged: {found if version else 'it has no tables'}")
        (code,) = db.execute("SELECT COUNT(*) FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone()
        if code:
            raise ObjectCorrupt(f"the catalog {path} has triggers or views, which none of blend's has")
        documents, nbytes = db.execute("SELECT COUNT(*), COALESCE(SUM(nbytes), 0) FROM documents").fetchone()
        (chunks,) = db.execute("SELECT COUNT(*) FROM chunks").fetchone()
    return CatalogSize(version, documents, chunks, nbytes)


def content_keys(path: Path) -> frozenset[str]:
    """The content keys that a catalog which nobody uses refers to: of its chunks, and of KV that is to be forgotten."""
    with _reading(path) as db:
        rows = db.execute("SELECT content_key FROM chunks UNION SELECT content_key FROM pending_forget")
        return frozenset(key for (key,) in rows)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    with typed_errors(path), closing(_open(path, "ro&immutable=1")) as db:
        yield db


def _open(path: Path, mode: str) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)

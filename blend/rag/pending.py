"""The catalog's chunks whose KV is to be forgotten: no stored chunk refers to them, but a store may hold their KV.

A row comes in the transaction that takes a content key's last chunk, or before KV is made for a chunk that no document
has yet. It goes in the transaction that stores a chunk with that key, or once the KV was forgotten. So a process may
end at any moment: what it left behind stands here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from blend.rag.records import Orphan, token_ids_of
from blend.types import Chunk


def note(db: sqlite3.Connection, namespace: str, chunks: Mapping[str, bytes]) -> tuple[Orphan, ...]:
    """Note those content keys that no chunk refers to; ``chunks`` maps them to token ids. Returns what was noted."""
    used = "SELECT 1 FROM chunks WHERE content_key = ? LIMIT 1"
    noted = []
    for key, token_ids in chunks.items():
        if not db.execute(used, (key,)).fetchone():
            # A row that is there already gets a new id, so that :func:`drop` with the old one leaves it alone.
            cursor = db.execute(
                "INSERT OR REPLACE INTO pending_forget (namespace, content_key, token_ids) VALUES (?, ?, ?)",
                (namespace, key, token_ids),
            )
            noted.append(Orphan(key, Chunk(token_ids_of(token_ids)), int(cursor.lastrowid or 0)))
    return tuple(noted)


def clear(db: sqlite3.Connection, content_keys: Iterable[str]) -> None:
    """Take out keys that a chunk refers to again."""
    db.executemany("DELETE FROM pending_forget WHERE content_key = ?", [(key,) for key in set(content_keys)])


def listed(db: sqlite3.Connection, namespace: str) -> tuple[Orphan, ...]:
    """Everything of a namespace that is to be forgotten, oldest first."""
    rows = db.execute(
        "SELECT content_key, token_ids, row FROM pending_forget WHERE namespace = ? ORDER BY row", (namespace,)
    ).fetchall()
    return tuple(Orphan(key, Chunk(token_ids_of(blob)), row) for key, blob, row in rows)


def drop(db: sqlite3.Connection, orphans: Iterable[Orphan]) -> None:
    """Take out what was forgotten, unless it was noted again since."""
    db.executemany("DELETE FROM pending_forget WHERE row = ?", [(orphan.ticket,) for orphan in orphans])

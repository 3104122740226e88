"""The catalog's generations and its log of chunk rows that came and went, one of each per namespace.

A generation's random stamp tells it from the same count of another past, such as that of a catalog which was
restored from a backup and went on from there.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable

from blend.rag.records import Changes, Head

_REMOVED, _ADDED = 0, 1


def begin(db: sqlite3.Connection, namespace: str) -> None:
    """Give the namespace generation 0, unless it has one already."""
    db.execute(
        "INSERT INTO generations SELECT ?, 0, ? WHERE NOT EXISTS (SELECT 1 FROM generations WHERE namespace = ?)",
        (namespace, secrets.token_hex(8), namespace),
    )


def head(db: sqlite3.Connection, namespace: str) -> Head:
    """The present generation."""
    row = db.execute(
        "SELECT generation, stamp FROM generations WHERE namespace = ? ORDER BY generation DESC LIMIT 1", (namespace,)
    ).fetchone()
    return Head(*row)


def append(
    db: sqlite3.Connection, namespace: str, removed: Iterable[int], added: Iterable[int], log_limit: int
) -> None:
    """Start a generation with these changes, and forget whole generations beyond ``log_limit`` changes."""
    generation = head(db, namespace).generation + 1
    db.execute("INSERT INTO generations VALUES (?, ?, ?)", (namespace, generation, secrets.token_hex(8)))
    entries = [(_REMOVED, row_id) for row_id in removed] + [(_ADDED, row_id) for row_id in added]
    db.executemany(
        "INSERT INTO changes (namespace, generation, op, chunk) VALUES (?, ?, ?, ?)",
        [(namespace, generation, op, row_id) for op, row_id in entries],
    )
    beyond = db.execute(
        "SELECT generation FROM changes WHERE namespace = ? ORDER BY generation DESC, seq DESC LIMIT 1 OFFSET ?",
        (namespace, log_limit),
    ).fetchone()
    if beyond:
        # The generation itself stays: it is the earliest state whose followers are all in the log.
        db.execute("DELETE FROM changes WHERE namespace = ? AND generation <= ?", (namespace, beyond[0]))
        db.execute("DELETE FROM generations WHERE namespace = ? AND generation < ?", (namespace, beyond[0]))


def since(db: sqlite3.Connection, namespace: str, base: Head) -> Changes | None:
    """What changed from ``base`` to now; ``None`` if the log does not reach back, or ``base`` is of another past."""
    known = db.execute(
        "SELECT stamp FROM generations WHERE namespace = ? AND generation = ?", (namespace, base.generation)
    ).fetchone()
    if known is None or known[0] != base.stamp:
        return None
    rows = db.execute(
        "SELECT chunk, MIN(op) FROM changes WHERE namespace = ? AND generation > ? GROUP BY chunk ORDER BY chunk",
        (namespace, base.generation),
    ).fetchall()
    return Changes(
        head(db, namespace),
        added=tuple(row_id for row_id, op in rows if op == _ADDED),
        removed=tuple(row_id for row_id, op in rows if op == _REMOVED),
    )

"""What the SQLite files of this package have in common."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def transaction(
    db: sqlite3.Connection, begin: Literal["BEGIN", "BEGIN IMMEDIATE"] = "BEGIN IMMEDIATE"
) -> Iterator[sqlite3.Connection]:
    """What is done inside is written at its end, or not at all where something is raised.

    Args:
        db: a connection that begins no transactions of its own (``isolation_level=None``).
        begin: how it begins; one that only reads needs no ``IMMEDIATE``.

    Raises:
        sqlite3.Error: it cannot begin, or cannot be written.
    """
    db.execute(begin)
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite may have rolled back by itself: a full disk, say
            db.execute("ROLLBACK")
        raise

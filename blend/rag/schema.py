"""The catalog's tables, and the check that a file holds them."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blend.database import transaction
from blend.errors import ObjectCorrupt, TierUnavailable

SCHEMA_VERSION = 1

_LOG = logging.getLogger(__name__)
_APPLICATION_ID = 0x626C6E64  # "blnd"

# Row ids that are handed out are never reused, so that an index entry cannot come to mean another chunk. The text
# stands last in its table, because reading a later column would walk through it.
_TABLES = (
    """CREATE TABLE documents (
        row INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        id TEXT NOT NULL,
        title TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        digest TEXT NOT NULL,
        pipeline TEXT NOT NULL,
        nbytes INTEGER NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        text TEXT NOT NULL,
        UNIQUE (namespace, id)
    )""",
    """CREATE TABLE chunks (
        row INTEGER PRIMARY KEY AUTOINCREMENT,
        document INTEGER NOT NULL REFERENCES documents (row) ON DELETE CASCADE,
        ordinal INTEGER NOT NULL,
        start_char INTEGER NOT NULL,
        end_char INTEGER NOT NULL,
        content_key TEXT NOT NULL,
        text TEXT NOT NULL,
        token_ids BLOB NOT NULL,
        embedding BLOB NOT NULL,
        UNIQUE (document, ordinal)
    )""",
    "CREATE INDEX chunks_by_key ON chunks (content_key)",
    """CREATE TABLE generations (
        namespace TEXT NOT NULL,
        generation INTEGER NOT NULL,
        stamp TEXT NOT NULL,
        PRIMARY KEY (namespace, generation)
    ) WITHOUT ROWID""",
    """CREATE TABLE changes (
        seq INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        generation INTEGER NOT NULL,
        op INTEGER NOT NULL,
        chunk INTEGER NOT NULL
    )""",
    "CREATE INDEX changes_by_generation ON changes (namespace, generation)",
    """CREATE TABLE pending_forget (
        row INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace TEXT NOT NULL,
        content_key TEXT NOT NULL UNIQUE,
        token_ids BLOB NOT NULL
    )""",
)


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Set up a connection, and the tables of a new file.

    Raises:
        ObjectCorrupt: the file is another program's database, or was written by a newer version.
        sqlite3.Error: it cannot be read, or is no database.
    """
    version = version_of(db, path)
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        _LOG.warning("the catalog %s is in journal mode %s: its file system has no write-ahead log", path, mode)
    db.execute("PRAGMA foreign_keys = ON")
    # A deletion must be on the device before KV goes, so commits are flushed.
    db.execute("PRAGMA synchronous = FULL")
    # What is deleted is not to be found in the file either.
    db.execute("PRAGMA secure_delete = ON")
    if version == 0:
        _create(db)


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """The schema version of a catalog; 0 for a new file.

    Raises:
        ObjectCorrupt: the file is another program's database, or was written by a newer version.
        sqlite3.Error: it cannot be read, or is no database.
    """
    version, application, tables = _state(db)
    if application != _APPLICATION_ID and (tables or application or version):
        raise ObjectCorrupt(f"{path} is a database, but not a catalog of blend")
    if version > SCHEMA_VERSION:
        raise ObjectCorrupt(
            f"the catalog {path} has schema version {version}; this version of blend reads up to {SCHEMA_VERSION}: "
            "use a newer blend, or another data directory"
        )
    return version


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into :class:`TierUnavailable` and :class:`ObjectCorrupt`, but for those that are bugs."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
        raise  # a bug, not the file's fault
    except (sqlite3.OperationalError, sqlite3.InterfaceError) as error:
        raise TierUnavailable(f"the catalog {path} cannot be used: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ObjectCorrupt(f"the catalog {path} is damaged, or is none: {error}") from error


def _state(db: sqlite3.Connection) -> tuple[int, int, int]:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    application = db.execute("PRAGMA application_id").fetchone()[0]
    tables = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    return int(version), int(application), int(tables)


def _create(db: sqlite3.Connection) -> None:
    with transaction(db):
        # Another process may have been first.
        if _state(db)[0] == 0:
            for statement in _TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

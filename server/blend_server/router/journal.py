"""What the engines should hold, and what some have not been given yet: one SQLite file.

A *change* is a document that is to come or to go. It is written here before any engine hears of it, and stays until
every engine has it. The last applied change of a document decides what every engine should hold of it, which the table
``documents`` says; the texts themselves are here only as long as an engine waits for them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blend.database import transaction
from blend.errors import InvalidConfig, ResourceExhausted, TierUnavailable
from blend.sizes import show_size

_SCHEMA = """
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS documents (
    owner TEXT, id TEXT, title TEXT, sha256 TEXT, PRIMARY KEY (owner, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, document BLOB, applied INTEGER
);
CREATE TABLE IF NOT EXISTS waiting (engine TEXT, number INTEGER, PRIMARY KEY (engine, number)) WITHOUT ROWID;
"""


class Held(NamedTuple):
    """What tells one version of a document from another."""

    title: str
    sha256: str


@dataclass(frozen=True)
class Change:
    """A document to take, a serialised message, or to delete: ``None``. ``applied``: some engine has done so."""

    number: int
    owner: str
    id: str
    document: bytes | None
    applied: bool = False


class Journal:
    """The journal of one router; it belongs to one thread. Its methods raise ``TierUnavailable`` where the file fails.

    Args:
        path: the file.
        engines: the names of all engines. What others wait for is forgotten.
        most_nbytes: most bytes of documents that may wait.

    Raises:
        InvalidConfig: the file cannot be used.
    """

    def __init__(self, path: Path, engines: Sequence[str], most_nbytes: int) -> None:
        self._engines = tuple(engines)
        self._most_nbytes = most_nbytes
        self._unclean = False  # whether the write-ahead log may hold a text that nobody waits for
        try:
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(_SCHEMA)
            with transaction(self._db):
                marks = ", ".join("?" * len(self._engines))
                self._db.execute(f"DELETE FROM waiting WHERE engine NOT IN ({marks})", self._engines)
                self._tidy()
            self._clean()  # the last router may not have come to it
        except (OSError, sqlite3.Error) as error:
            allowed = "a directory with a router's journal, or an empty one"
            raise InvalidConfig("data_dir", f"{path}: {error}", allowed) from error

    def begin(self, owner: str, document_id: str, document: bytes | None) -> int:
        """Note a change that every engine is to be given; returns its number.

        Raises:
            ResourceExhausted: engines that are away have left no room for it.
        """
        with self._transaction():
            (used,) = self._db.execute("SELECT COALESCE(SUM(LENGTH(document)), 0) FROM changes").fetchone()
            if used + len(document or b"") > self._most_nbytes:
                raise ResourceExhausted(
                    f"the router's journal is full: {show_size(used)} of documents wait for engines that are away, and "
                    f"{show_size(self._most_nbytes)} are allowed"
                )
            return self._add(owner, document_id, document)

    def refused(self, number: int) -> None:
        """Forget a change that no engine has taken."""
        with self._transaction():
            self._forget(number)

    def absent(self, number: int, engine: str) -> bool:
        """Note that an engine which was to delete a document has none of that id.

        Returns:
            whether the deletion stands as one that is applied, for an earlier change may bring the document yet; else
            it is forgotten.
        """
        with self._transaction():
            earlier = self._db.execute(
                "SELECT 1 FROM changes e JOIN changes c ON e.owner = c.owner AND e.id = c.id AND e.number < c.number "
                "WHERE c.number = ? AND e.document IS NOT NULL",
                (number,),
            ).fetchone()
            if earlier is None:
                self._forget(number)
            else:
                self._apply(number, engine, None)
        return earlier is not None

    def cancel(self, owner: str, document_id: str) -> bool:
        """Have a document deleted instead of what no engine is known to have taken of it.

        Returns:
            whether there was such a change; where there was none nothing is to be deleted either.
        """
        with self._transaction():
            rows = self._db.execute(
                "SELECT number FROM changes WHERE owner = ? AND id = ? AND NOT applied AND document IS NOT NULL",
                (owner, document_id),
            ).fetchall()
            for (number,) in rows:
                self._forget(number)
            if rows:
                self._add(owner, document_id, None)
        return bool(rows)

    def give_up(self, change: Change) -> bool:
        """Forget a change that no engine is known to have taken, though some may have.

        Where they should hold nothing of that id, they are to delete it; else the comparison tells whether they have.

        Returns:
            whether it was there, and no engine has taken it meanwhile.
        """
        with self._transaction():
            found = self._db.execute("SELECT applied FROM changes WHERE number = ?", (change.number,)).fetchone()
            if found != (0,):
                return False
            self._forget(change.number)
            known = "SELECT 1 FROM documents WHERE owner = ? AND id = ?"
            later = "SELECT 1 FROM changes WHERE owner = ? AND id = ? AND number > ?"
            about = change.owner, change.id
            if not (
                self._db.execute(known, about).fetchone() or self._db.execute(later, (*about, change.number)).fetchone()
            ):
                self._add(*about, None)
        return True

    def skipped(self, number: int, engine: str) -> bool:
        """Note that an engine has refused a change, unless another has taken it: then it waits for this one as before.

        Returns:
            whether the engine is rid of it.
        """
        with self._transaction():
            found = self._db.execute("SELECT applied FROM changes WHERE number = ?", (number,)).fetchone()
            if found == (1,):
                return False
            self._db.execute("DELETE FROM waiting WHERE number = ? AND engine = ?", (number, engine))
            self._tidy()
        return True

    def applied(self, number: int, engine: str, held: Held | None) -> bool:
        """Note that an engine has taken a change, and what it holds of the document now.

        What was to be done with the document before is not to be done any more, and engines that had refused the
        change are to be given it again.

        Returns:
            whether it is the first engine to take it.
        """
        with self._transaction():
            return self._apply(number, engine, held)

    def next(self, owner: str, engine: str) -> Change | None:
        """Return the first of an owner's changes that an engine has not taken."""
        with _usable():
            found = self._db.execute(
                "SELECT c.number, c.owner, c.id, c.document, c.applied FROM changes c JOIN waiting w USING (number) "
                "WHERE w.engine = ? AND c.owner = ? ORDER BY c.number LIMIT 1",
                (engine, owner),
            ).fetchone()
        return None if found is None else _change(*found)

    def counts(self) -> dict[str, int]:
        """Return how many changes each engine has not taken."""
        with _usable():
            found = dict(self._db.execute("SELECT engine, COUNT(*) FROM waiting GROUP BY engine").fetchall())
        return {engine: found.get(engine, 0) for engine in self._engines}

    def documents(self, owner: str) -> dict[str, Held] | None:
        """Return what every engine should hold of an owner's documents, by id; ``None`` where that is not known."""
        with _usable():
            if self._db.execute("SELECT 1 FROM owners WHERE owner = ?", (owner,)).fetchone() is None:
                return None
            rows = self._db.execute("SELECT id, title, sha256 FROM documents WHERE owner = ?", (owner,)).fetchall()
        return {document_id: Held(title, sha256) for document_id, title, sha256 in rows}

    def adopt(self, owner: str, documents: Mapping[str, Held]) -> None:
        """Note what all engines hold of an owner's documents, who was not known before."""
        with self._transaction():
            self._db.execute("INSERT INTO owners VALUES (?)", (owner,))
            rows = [(owner, document_id, *held) for document_id, held in documents.items()]
            self._db.executemany("INSERT INTO documents VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _add(self, owner: str, document_id: str, document: bytes | None) -> int:
        number = self._db.execute(
            "INSERT INTO changes (owner, id, document, applied) VALUES (?, ?, ?, 0)", (owner, document_id, document)
        ).lastrowid
        assert number is not None
        self._await(number)
        return number

    def _apply(self, number: int, engine: str, held: Held | None) -> bool:
        found = self._db.execute("SELECT owner, id, applied FROM changes WHERE number = ?", (number,)).fetchone()
        if found is None:
            return False
        owner, document_id, applied = found
        if not applied:
            self._await(number)
            self._db.execute("UPDATE changes SET applied = 1 WHERE number = ?", (number,))
            earlier = "SELECT number FROM changes WHERE owner = ? AND id = ? AND number < ?"
            self._db.execute(f"DELETE FROM waiting WHERE number IN ({earlier})", (owner, document_id, number))
            if held is None:
                self._db.execute("DELETE FROM documents WHERE owner = ? AND id = ?", (owner, document_id))
            else:
                self._db.execute("REPLACE INTO documents VALUES (?, ?, ?, ?)", (owner, document_id, *held))
        self._db.execute("DELETE FROM waiting WHERE number = ? AND engine = ?", (number, engine))
        self._tidy()
        return not applied

    def _forget(self, number: int) -> None:
        self._db.execute("DELETE FROM waiting WHERE number = ?", (number,))
        self._tidy()

    def _await(self, number: int) -> None:
        rows = [(engine, number) for engine in self._engines]
        self._db.executemany("INSERT OR IGNORE INTO waiting VALUES (?, ?)", rows)

    def _tidy(self) -> None:
        gone = "FROM changes WHERE number NOT IN (SELECT number FROM waiting)"
        (texts,) = self._db.execute(f"SELECT COUNT(document) {gone}").fetchone()
        self._unclean = self._unclean or texts > 0
        self._db.execute(f"DELETE {gone}")

    def _clean(self) -> None:
        """Empty the write-ahead log: what was deleted is still in it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._unclean = False

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction, after which no file holds a text that nobody waits for."""
        with _usable():
            with transaction(self._db):
                yield
            if self._unclean:
                self._clean()


@contextmanager
def _usable() -> Iterator[None]:
    """What SQLite raises inside becomes ``TierUnavailable``."""
    try:
        yield
    except sqlite3.Error as error:
        raise TierUnavailable(f"the router's journal: {error}") from error


def _change(number: int, owner: str, document_id: str, document: bytes | None, applied: int) -> Change:
    return Change(number, owner, document_id, document, bool(applied))

"""The journal: what every engine should hold, and what each has not been given."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend.errors import InvalidConfig, ResourceExhausted, TierUnavailable
from blend_server.router.journal import Change, Held, Journal

ENGINES = ("a", "b")
FIRST, SECOND = Held("", "1"), Held("", "2")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal", ENGINES, 1000)
    made.adopt("t", {})
    yield made
    made.close()


def numbers(journal: Journal, engine: str) -> int | None:
    found = journal.next("t", engine)
    return None if found is None else found.number


def test_a_change_waits_for_every_engine(journal: Journal) -> None:
    number = journal.begin("t", "d", b"text")
    assert (numbers(journal, "a"), numbers(journal, "b")) == (number, number)
    assert journal.documents("t") == {}
    journal.applied(number, "a", FIRST)
    assert (numbers(journal, "a"), numbers(journal, "b")) == (None, number)
    assert journal.documents("t") == {"d": FIRST}
    found = journal.next("t", "b")
    assert found is not None and found.applied and found.document == b"text"
    journal.applied(number, "b", FIRST)
    assert journal.counts() == {"a": 0, "b": 0}


def test_the_last_change_of_a_document_is_the_one_that_is_given(journal: Journal) -> None:
    journal.applied(journal.begin("t", "d", b"one"), "a", FIRST)
    journal.applied(journal.begin("t", "other", b"other"), "a", FIRST)
    last = journal.begin("t", "d", None)
    journal.applied(last, "a", None)
    assert journal.counts() == {"a": 0, "b": 2}
    assert journal.documents("t") == {"other": FIRST}


def test_a_refused_change_leaves_the_one_before(journal: Journal) -> None:
    first = journal.begin("t", "d", b"one")
    journal.applied(first, "a", FIRST)
    journal.refused(journal.begin("t", "d", b"two"))
    assert numbers(journal, "b") == first
    assert journal.documents("t") == {"d": FIRST}


def test_who_refused_what_another_took_is_given_it_again(journal: Journal) -> None:
    number = journal.begin("t", "d", b"one")
    assert journal.skipped(number, "b")
    assert (numbers(journal, "a"), numbers(journal, "b")) == (number, None)
    journal.applied(number, "a", FIRST)
    assert (numbers(journal, "a"), numbers(journal, "b")) == (None, number)
    gone = journal.begin("t", "e", b"one")
    for engine in ENGINES:
        journal.skipped(gone, engine)
    assert numbers(journal, "a") is None


def test_who_refuses_what_another_has_taken_meanwhile_is_given_it_again(journal: Journal) -> None:
    number = journal.begin("t", "d", b"one")
    journal.applied(number, "a", FIRST)
    assert not journal.skipped(number, "b")
    assert numbers(journal, "b") == number
    journal.applied(number, "b", FIRST)
    assert journal.skipped(number, "b"), "nothing is left of it"


def test_a_deletion_of_what_is_not_there_stands_where_it_may_come_yet(journal: Journal) -> None:
    assert not journal.absent(journal.begin("t", "d", None), "b")
    assert journal.counts() == {"a": 0, "b": 0}
    doubtful = journal.begin("t", "d", b"one")
    journal.skipped(doubtful, "b")
    deletion = journal.begin("t", "d", None)
    assert journal.absent(deletion, "b")
    assert (numbers(journal, "a"), numbers(journal, "b")) == (deletion, None)
    assert not journal.applied(doubtful, "a", FIRST), "an engine that was about to take it holds what is to go"
    journal.applied(deletion, "a", None)
    assert journal.counts() == {"a": 0, "b": 0}
    assert journal.documents("t") == {}


def test_what_is_given_up_is_deleted_unless_it_was_there_or_comes_again(journal: Journal) -> None:
    def waits() -> list[tuple[int, bytes | None]]:
        found = journal.next("t", "a")
        return [] if found is None else [(found.number, found.document)]

    def begun(text: bytes | None) -> Change:
        return Change(journal.begin("t", "d", text), "t", "d", text)

    new = begun(b"one")
    assert journal.give_up(new)
    assert not journal.give_up(new)
    ((deletion, text),) = waits()
    assert deletion > new.number and text is None
    assert not journal.applied(new.number, "b", FIRST), "which has it to be deleted next"
    first, second = begun(b"one"), begun(b"two")
    for engine in ENGINES:
        journal.applied(deletion, engine, None)
    assert journal.give_up(first)
    assert waits() == [(second.number, b"two")]
    for engine in ENGINES:
        journal.applied(second.number, engine, SECOND)
    assert not journal.give_up(second)
    assert journal.give_up(begun(b"three"))
    assert waits() == []
    assert journal.documents("t") == {"d": SECOND}


def test_what_no_engine_has_taken_can_be_cancelled(journal: Journal) -> None:
    assert not journal.cancel("t", "d")
    taken = journal.begin("t", "d", b"one")
    journal.applied(taken, "a", FIRST)
    assert not journal.cancel("t", "d")
    journal.begin("t", "d", b"two")
    assert journal.cancel("t", "d")
    change = journal.next("t", "a")
    assert change is not None and change.document is None
    journal.applied(change.number, "a", None)
    assert journal.documents("t") == {}
    assert journal.counts() == {"a": 0, "b": 1}


def test_owners_are_apart_and_unknown_at_first(journal: Journal) -> None:
    journal.begin("other", "d", b"text")
    assert numbers(journal, "a") is None
    assert journal.documents("other") is None
    journal.adopt("other", {"d": FIRST})
    assert journal.documents("other") == {"d": FIRST}
    assert journal.documents("t") == {}


def test_it_is_kept_for_its_engines_in_a_file_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path, ENGINES, 1000)
    first.applied(first.begin("t", "d", b"text"), "a", FIRST)
    first.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = Journal(path, ENGINES, 1000)
    assert second.counts() == {"a": 0, "b": 1}
    second.close()
    third = Journal(path, ("a",), 1000)
    assert third.counts() == {"a": 0}
    third.close()
    assert b"text" not in path.read_bytes()
    path.write_bytes(b"no database" * 100)
    with pytest.raises(InvalidConfig):
        Journal(path, ENGINES, 1000)


def test_no_file_holds_a_text_that_nobody_waits_for(tmp_path: Path) -> None:
    directory = tmp_path / "router"
    directory.mkdir()
    journal = Journal(directory / "journal", ENGINES, 1 << 20)

    def found() -> list[str]:
        return [path.name for path in directory.iterdir() if b"confidential" in path.read_bytes()]

    for text in (b"confidential", b"confidential " * 5000):
        number = journal.begin("t", "d", text)
        journal.applied(number, "a", FIRST)
        assert found()
        journal.applied(number, "b", FIRST)
        assert found() == []
        journal.refused(journal.begin("t", "d", text))
        assert found() == []
        journal.begin("t", "d", text)
        journal.cancel("t", "d")
        assert found() == []
    journal.close()


def test_a_file_that_fails_is_an_error_of_blends(journal: Journal, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal") as db:
        for table in ("waiting", "changes", "owners"):
            db.execute(f"DROP TABLE {table}")
    db.close()
    attempts: list[Callable[[], object]] = [
        lambda: journal.next("t", "a"),
        lambda: journal.documents("t"),
        journal.counts,
        lambda: journal.begin("t", "d", b"text"),
    ]
    for attempt in attempts:
        with pytest.raises(TierUnavailable, match="the router's journal: no such table"):
            attempt()


def test_its_room_is_bounded(journal: Journal) -> None:
    number = journal.begin("t", "d", b"x" * 900)
    with pytest.raises(ResourceExhausted, match="journal is full"):
        journal.begin("t", "e", b"x" * 200)
    journal.begin("t", "e", None)
    for engine in ENGINES:
        journal.applied(number, engine, FIRST)
    journal.begin("t", "e", b"x" * 200)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["d", "e"]), st.sampled_from([None, "1", "2"]), st.sampled_from(["a", "b", "ab", ""]))
    )
)
def test_engines_that_take_all_that_waits_hold_the_same(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str | None, str]]
) -> None:
    """Whoever is away when: in the end both hold what the journal says."""
    journal = Journal(tmp_path_factory.mktemp("journal") / "file", ENGINES, 1 << 20)
    journal.adopt("t", {})
    held: dict[str, dict[str, Held]] = {"a": {}, "b": {}}

    def give(engine: str, document_id: str, version: str | None, number: int) -> None:
        if version is None:
            held[engine].pop(document_id, None)
            journal.applied(number, engine, None)
        else:
            held[engine][document_id] = Held("", version)
            journal.applied(number, engine, Held("", version))

    for document_id, version, there in changes:
        number = journal.begin("t", document_id, None if version is None else version.encode())
        for engine in there:
            give(engine, document_id, version, number)
    for engine in ENGINES:
        while (change := journal.next("t", engine)) is not None:
            give(engine, change.id, None if change.document is None else change.document.decode(), change.number)
    assert held["a"] == held["b"] == journal.documents("t")
    assert journal.counts() == {"a": 0, "b": 0}
    journal.close()

"""What a chunk is encoded behind: its nearest chunks that are not too long, and never its own text."""

from __future__ import annotations

from collections.abc import Callable

from blend.rag import Library
from tests.rag.test_library import ingest

Open = Callable[..., Library]

ANY = 10_000
TEXTS = {
    "one": "red green blue one",
    "two": "red green blue two",
    "three": "red green three three",
    "four": "red four four four",
    "five": "five five five five",
}


def rows(library: Library) -> dict[int, str]:
    """The documents, of one chunk each, by their chunks' row ids."""
    return {library.chunks_of(name)[0].row_id: name for name in [d.id for d in library.list().documents]}


def names(library: Library, name: str, count: int, longest: int = ANY) -> list[str]:
    """The documents that a document's chunk is to be encoded behind, none of more than ``longest`` tokens."""
    (row,) = [row for row, other in rows(library).items() if other == name]
    (found,) = library.neighbours.of([row], count, lambda tokens: longest)
    assert found.chunk.row_id == row
    return [other.document_id for other in found.neighbours]


def test_the_nearest_stands_last(open_library: Open) -> None:
    with open_library() as library:
        for name, text in TEXTS.items():
            ingest(library, name, text)
        assert names(library, "one", 3) == ["four", "three", "two"]
        assert names(library, "one", 1) == ["two"]
        assert len(names(library, "one", 10)) == 4, "there are no more"


def test_the_same_chunks_have_the_same_neighbours_whatever_came_and_went(open_library: Open) -> None:
    with open_library() as library:
        for name, text in TEXTS.items():
            ingest(library, name, text)
        expected = {name: names(library, name, 3) for name in TEXTS}
        ingest(library, "six", "red green blue six")
        library.delete("six")
        assert {name: names(library, name, 3) for name in TEXTS} == expected
    with open_library() as library:
        assert {name: names(library, name, 3) for name in TEXTS} == expected


def test_copies_of_a_text_are_no_neighbours_of_it_nor_twice_of_another(open_library: Open) -> None:
    with open_library() as library:
        for name, text in TEXTS.items():
            ingest(library, name, text)
        for number in range(40):
            ingest(library, f"copy {number}", TEXTS["one"])
            ingest(library, f"titled {number}", TEXTS["one"], "A title")
        assert names(library, "one", 3) == ["four", "three", "two"]
        assert set(names(library, "copy 3", 3)) == {"four", "three", "two"}
        behind = names(library, "two", 2)
        assert behind[0] == "three" and behind[1] not in TEXTS.keys() - {"one"}


def test_the_next_nearest_stand_in_for_those_that_are_too_long(open_library: Open) -> None:
    with open_library() as library:
        for name, text in TEXTS.items():
            ingest(library, name, text)
        ingest(library, "long", "red green blue one " * 3)
        long, own = (len(library.chunks_of(name)[0].token_ids) for name in ("long", "one"))
        shorter = names(library, "one", 2)
        assert names(library, "one", 2, long) == shorter and "long" in shorter
        assert names(library, "one", 2, long - 1) == ["three", "two"]
        assert names(library, "one", 2, 0) == []
        (row,) = [row for row, name in rows(library).items() if name == "one"]
        asked: list[int] = []
        library.neighbours.of([row], 2, lambda tokens: asked.append(tokens) or ANY)  # type: ignore[func-returns-value]
        assert set(asked) == {own}, "it is the chunk's length that decides"


def test_chunks_that_are_gone_have_none_and_are_none(open_library: Open) -> None:
    with open_library() as library:
        for name, text in TEXTS.items():
            ingest(library, name, text)
        gone = library.chunks_of("two")[0].row_id
        library.delete("two")
        assert library.neighbours.of([gone], 3, lambda tokens: ANY) == ()
        assert names(library, "one", 2) == ["four", "three"]
    with open_library() as library:
        for name in ("three", "four", "five"):
            library.delete(name)
        assert names(library, "one", 3) == []


def test_changes_are_told_from_a_state_on(open_library: Open) -> None:
    with open_library() as library:
        for name in ("one", "two"):
            ingest(library, name, TEXTS[name])
        first = library.neighbours.everything()
        assert set(first.added) == set(rows(library)) and first.removed == ()
        gone = library.chunks_of("two")[0].row_id
        library.delete("two")
        ingest(library, "three", TEXTS["three"])
        changes = library.neighbours.changes_since(first.head)
        assert changes is not None
        assert changes.added == (library.chunks_of("three")[0].row_id,) and changes.removed == (gone,)
        assert library.neighbours.changes_since(first.head._replace(stamp="another past")) is None


def test_around_a_new_chunk_are_those_that_may_have_it_for_a_neighbour(open_library: Open) -> None:
    with open_library() as library:
        for name, text in TEXTS.items():
            ingest(library, name, text)
        by_row = rows(library)
        (new,) = [row for row, name in by_row.items() if name == "three"]
        assert {by_row[row] for row in library.neighbours.around([new], 2)} <= {"one", "two", "four"}

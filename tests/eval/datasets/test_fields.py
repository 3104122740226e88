"""Any other JSON, by a map of its fields."""

from __future__ import annotations

import pytest

from blend.errors import InvalidInput
from blend.eval.datasets import Passage, load
from tests.eval.datasets.conftest import Write

ROW = {
    "meta": {"key": 17},
    "q": "who?",
    "a": [{"text": "Ann"}, {"text": ["Bo"]}],
    "docs": {"found": [{"t": "T", "body": "one", "hit": 1}, {"t": None, "body": "two", "hit": 0}]},
}
MAP = {"id": "meta.key", "question": "q", "answers": "a.text", "passages": "docs.found", "title": "t", "text": "body"}


def test_paths_lead_through_objects_and_lists(write: Write) -> None:
    for path in (write([ROW]), write([ROW], "data.jsonl"), write({"version": 2, "rows": [ROW]})):
        (example,) = load(path, fields={**MAP, "gold": "hit"}).examples
        assert (example.id, example.question, example.answers) == ("17", "who?", ("Ann", "Bo"))
        assert example.passages == (Passage("T", "one", gold=True), Passage("", "two"))


def test_what_the_map_leaves_out_stands_under_its_own_name(write: Write) -> None:
    row = {"id": "x", "question": "q?", "answers": "a", "docs": ["one", {"title": "T", "text": "two"}]}
    (example,) = load(write([row]), fields={"passages": "docs"}).examples
    assert example.id == "x"
    assert example.passages == (Passage("", "one"), Passage("T", "two"))


def test_a_dot_may_be_part_of_a_name(write: Write) -> None:
    row = {"a.b": "q?", "answers": "a", "passages": ["t"]}
    assert load(write([row]), fields={"question": "a.b"}).examples[0].question == "q?"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"answers": "a.txt"}, r"record 1, a\.txt"),
        ({"passages": "docs"}, r"record 1, docs 1, t: "),
        ({"passages": "docs.lost"}, r"record 1, docs\.lost"),
        ({"title": "heading"}, r"record 1, docs\.found 1, heading"),
        ({"id": "key"}, "record 1, key: .*meta, q, a, docs"),
        ({"gold": "t"}, "record 1, docs.found 1, t: .*true or false"),
    ],
)
def test_a_path_that_leads_nowhere_is_told(write: Write, change: dict[str, str], place: str) -> None:
    with pytest.raises(InvalidInput, match=place):
        load(write([ROW]), fields={**MAP, **change})


def test_names_and_paths_of_the_map_are_checked_first() -> None:
    with pytest.raises(InvalidInput, match=r"fields: got 'answer'; allowed: answers \(the nearest\)"):
        load("nowhere.json", fields={"answer": "a"})
    with pytest.raises(InvalidInput, match="fields, answers"):
        load("nowhere.json", fields={"answers": ""})


def test_a_file_of_no_known_format_asks_for_a_map(write: Write) -> None:
    with pytest.raises(InvalidInput, match=r"record 1: got 'fields meta, q, a, docs'; allowed: .*map of its fields"):
        load(write([ROW]))

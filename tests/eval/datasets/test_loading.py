"""Names, ids, limits and digests: what all data sets share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blend.errors import InvalidInput, NotFound
from blend.eval.datasets import NAMES, EmbeddingRetriever, load
from tests.eval.datasets.conftest import Write
from tests.rag.words import WordEmbedder


def rows(*ids: object) -> list[dict[str, Any]]:
    return [{"id": i, "question": f"{n}?", "answers": ["a"], "ctxs": ["t"]} for n, i in enumerate(ids)]


def test_the_demo_corpus_is_a_data_set() -> None:
    found = load("demo", passages=5)
    assert found.name == "demo" and len(found.examples) == 20 and not found.dropped
    assert all(len(e.passages) == 5 and e.answers and any(p.gold for p in e.passages) for e in found.examples)
    assert all(all(p.gold for p in e.passages) for e in load("demo", passages=1).examples)
    assert found == load("demo", passages=5)
    assert found.digest != load("demo", passages=5, seed=1).digest


def test_a_limit_spreads_over_the_questions_that_can_be_used(write: Write) -> None:
    data = rows(*"abcdefghij")
    data[0]["answers"] = []
    found = load(write(data), limit=3)
    assert [e.id for e in found.examples] == ["b", "e", "h"]
    assert found.dropped == {"no answers": 1}
    assert len(load(write(data), limit=99).examples) == 9


def test_what_cannot_be_used_is_dropped_and_counted(write: Write) -> None:
    data = rows(*"abcde")
    data[0]["question"] = " "
    data[1]["answers"] = ["", None, [" "]]
    data[2]["ctxs"] = []
    data[3]["ctxs"] = ["", "t"]
    found = load(write(data))
    assert [e.id for e in found.examples] == ["d", "e"]
    assert [len(e.passages) for e in found.examples] == [1, 1]
    assert found.dropped == {"no question": 1, "no answers": 1, "no passages": 1, "blank passages": 1}


def test_nothing_that_can_be_used_is_refused_with_the_counts(write: Write) -> None:
    data = rows("a", "b")
    data[0]["answers"] = data[1]["answers"] = []
    with pytest.raises(InvalidInput, match=r"data\.json: got '2 no answers'"):
        load(write(data))
    with pytest.raises(InvalidInput, match=r"data\.jsonl: got 'no questions'"):
        load(write([], "data.jsonl"))


def test_ids_are_made_distinct(write: Write) -> None:
    found = load(write(rows("a", "a", "a#2", "a", None, 4, ""))).examples
    assert [e.id for e in found] == ["a", "a#3", "a#2", "a#4", "4", "4#2", "6"]


def test_the_digest_is_of_the_chosen_examples_alone(write: Write) -> None:
    first = load(write(rows("a", "b"), "one.json"))
    same = load(write({"name": "x", "data": rows("a", "b")}, "two.json"))
    assert len(first.digest) == 64 and first.digest == same.digest and first.name != same.name
    assert load(write(rows("a", "c"))).digest != first.digest
    assert load(write(rows("a", "b")), limit=1).digest == load(write(rows("a", "c")), limit=1).digest


@pytest.mark.parametrize(
    "content", ["3", "[]", "{}", '{"data": [{}]}', '[{"question": "q"}]', "[3]", '{"a": [], "b": []}']
)
def test_a_file_of_no_known_format_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"bad\.json"):
        load(str(tmp_path / "bad.json"))


@pytest.mark.parametrize("name", ["nowhere.json", "no/such/directory", "/nowhere", "nowhere/data.jsonl", "a/b.json"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(NotFound, match=name):
        load(name)


@pytest.mark.parametrize("name", ["dmeo", "Demo", "demo-corpus"])
def test_an_unknown_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"demo \(the nearest\)"):
        load(name)


@pytest.mark.parametrize("name", ["", None, 3, "\0", "a" * 100_000, "?", "?tokens=3", "demo?tokens=3"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises((InvalidInput, NotFound)):
        load(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"passages": 0},
        {"limit": 0},
        {"limit": -1},
        {"limit": True},
        {"passages": 2.5},
        {"seed": "x"},
        {"split": "train"},
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        load("demo", **wrong)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_fields_or_splits_takes_none(name: str) -> None:
    with pytest.raises(InvalidInput, match="fields"):
        load(name, fields={"question": "q"})
    with pytest.raises(InvalidInput, match="split"):
        load(name, split="train")


def test_a_file_has_no_splits(write: Write) -> None:
    with pytest.raises(InvalidInput, match="split"):
        load(write(rows("a")), split="train")


WORDS = (
    "id _id question answers answer ctxs title text paragraphs paragraph_text context qas sentences supporting_facts"
    " answerable data"
).split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["", " ", "a", "\ud800", "b c"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=300)
@given(document=JSON | st.lists(st.dictionaries(st.sampled_from(WORDS), JSON), min_size=1, max_size=3))
@example(document=[{"context": "t", "question": "q", "answers": [[]]}])
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(document), "utf-8")
    try:
        found = load(str(path), retriever=EmbeddingRetriever(WordEmbedder()))
    except InvalidInput as error:
        message = str(error)
    else:
        message = found.name
        assert found.examples and all(e.id and e.question and e.answers and e.passages for e in found.examples)
    assert "any.json" in message

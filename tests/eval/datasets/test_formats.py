"""Files in the formats that data sets are published in."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend.errors import InvalidInput
from blend.eval.datasets import Passage, load
from tests.eval.datasets.conftest import Write

HOTPOT = {
    "_id": "5a8b",
    "question": "Who directed it?",
    "answer": "Ann",
    "type": "bridge",
    "supporting_facts": [["Film", 0], ["Ann", 1]],
    "context": [["Film", ["It is a film.", " Ann made it."]], ["Other", ["No."]], ["Ann", ["A person.", " Tall."]]],
}
HOTPOT_ON_THE_HUB = {
    "id": "5a8b",
    "question": "Who directed it?",
    "answer": "Ann",
    "supporting_facts": {"title": ["Film", "Ann"], "sent_id": [0, 1]},
    "context": {
        "title": ["Film", "Other", "Ann"],
        "sentences": [["It is a film.", " Ann made it."], ["No."], ["A person.", " Tall."]],
    },
}
MUSIQUE = {
    "id": "2hop__1",
    "paragraphs": [
        {"idx": 0, "title": "A", "paragraph_text": "first", "is_supporting": False},
        {"idx": 1, "title": "B", "paragraph_text": "second", "is_supporting": True},
    ],
    "question": "Which?",
    "answer": "second",
    "answer_aliases": ["2nd", "second"],
    "answerable": True,
}


def test_cacheblend_keeps_its_passages_and_flattens_answers(write: Write) -> None:
    row = {"question": "q?", "answers": [["a", ["b"]], "c", 7], "ctxs": [{"title": None, "text": "t"}, {"text": "u"}]}
    (example,) = load(write([row]), passages=1).examples
    assert example.answers == ("a", "b", "c", "7")
    assert example.passages == (Passage("", "t"), Passage("", "u"))


def test_one_answer_need_not_be_a_list(write: Write) -> None:
    (example,) = load(write([{"question": "q?", "answers": " a ", "ctxs": ["t"]}])).examples
    assert example.answers == ("a",) and example.passages == (Passage("", "t"),)


@pytest.mark.parametrize("row", [HOTPOT, HOTPOT_ON_THE_HUB], ids=["published", "hub"])
def test_hotpotqa_and_2wiki_join_sentences_and_mark_what_facts_support(write: Write, row: dict[str, object]) -> None:
    (example,) = load(write([row]), passages=1).examples
    assert example.id == "5a8b" and example.answers == ("Ann",)
    assert example.passages == (
        Passage("Film", "It is a film. Ann made it.", gold=True),
        Passage("Other", "No."),
        Passage("Ann", "A person. Tall.", gold=True),
    )


def test_2wiki_without_answers_is_refused(write: Write) -> None:
    with pytest.raises(InvalidInput, match="1 no answers"):
        load(write([{**HOTPOT, "answer": None}]))


def test_musique_takes_aliases_and_drops_what_is_not_answerable(write: Write) -> None:
    rows = [MUSIQUE, {**MUSIQUE, "id": "2hop__2", "answerable": False}]
    found = load(write(rows, "musique.jsonl"))
    (example,) = found.examples
    assert example.id == "2hop__1" and example.answers == ("second", "2nd")
    assert example.passages == (Passage("A", "first"), Passage("B", "second", gold=True))
    assert found.dropped == {"no answers": 1}


def test_musique_test_set_has_no_labels(write: Write) -> None:
    plain = [{"title": "A", "paragraph_text": "first"}]
    (example,) = load(write([{"question": "q?", "answer": "first", "paragraphs": plain}])).examples
    assert example.passages == (Passage("A", "first"),)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"question": "q?", "ctxs": ["t"]}, "record 2, answers.*question, ctxs"),
        ({"question": "q?", "answers": ["a"]}, "record 2, ctxs"),
        ({"question": "q?", "answers": ["a"], "ctxs": [{"title": "t"}]}, "record 2, ctxs 1, text"),
        ({"question": "q?", "answers": ["a"], "ctxs": ["t", 3]}, "record 2, ctxs 2"),
        ({"question": "q?", "answers": ["a"], "ctxs": "t"}, "record 2, ctxs: .*a list"),
        ({"question": ["q?"], "answers": ["a"], "ctxs": ["t"]}, "record 2, question: .*text"),
        ({"question": "q?", "answers": [True], "ctxs": ["t"]}, "record 2, answers: .*text"),
        ({"question": "q?", "answers": [{}], "ctxs": ["t"]}, "record 2, answers: .*dict.*text"),
        ({"question": "\ud800", "answers": ["a"], "ctxs": ["t"]}, "record 2, question: .*UTF-8"),
        ("text", "record 2: .*object"),
        (None, "record 2: .*object"),
    ],
)
def test_a_fault_is_told_with_its_record_and_field(write: Write, row: object, place: str) -> None:
    good = {"question": "q?", "answers": ["a"], "ctxs": ["t"]}
    for name in ("data.json", "data.jsonl"):
        with pytest.raises(InvalidInput, match=rf"{name}, {place}"):
            load(write([good, row], name))


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({**HOTPOT, "context": [["Film"]]}, "context 1: .*pair: title and sentences"),
        ({**HOTPOT, "context": {"title": ["A", "B"], "sentences": [["s"]]}}, "context: .*one length"),
        ({**HOTPOT, "supporting_facts": [[["Film"], 0]]}, "supporting_facts 1, title"),
        ({**MUSIQUE, "answerable": "yes"}, "answerable: .*true or false"),
        ({k: v for k, v in MUSIQUE.items() if k != "answer"}, "answer: "),
    ],
)
def test_faults_of_the_other_formats(write: Write, row: object, place: str) -> None:
    with pytest.raises(InvalidInput, match=rf"record 1, {place}"):
        load(write([row]))


def test_the_shared_musique_sample(xquad: Path) -> None:
    found = load(str(xquad.parent / "musique_s_100.json"), limit=20)
    assert len(found.examples) == 20 and not found.dropped
    assert all(len(example.passages) == 10 and example.answers for example in found.examples)

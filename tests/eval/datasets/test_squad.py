"""SQuAD's formats, whose passages are retrieved from the file's own paragraphs."""

from __future__ import annotations

import pytest

from blend.errors import InvalidInput
from blend.eval.datasets import EmbeddingRetriever, Passage, load
from tests.eval.datasets.conftest import Write
from tests.rag.words import WordEmbedder

FRUIT = "apple pear plum cherry".split()
TITLES = ("Red", "Blue", "Green")


def article(title: str) -> dict[str, object]:
    """Four paragraphs, one about each fruit, with a question each."""
    return {
        "title": title,
        "paragraphs": [
            {
                "context": f"{title} {fruit} {fruit}.",
                "qas": [{"id": f"{title}-{fruit}", "question": f"{fruit}?", "answers": [{"text": title}] * 2}],
            }
            for fruit in FRUIT
        ],
    }


SQUAD = {"version": "1.1", "data": [article(title) for title in TITLES]}
ROWS = [
    {
        "id": f"{title}-{fruit}",
        "title": title,
        "context": f"{title} {fruit} {fruit}.",
        "question": f"{fruit}?",
        "answers": {"text": [title, title], "answer_start": [0, 0]},
    }
    for title in TITLES
    for fruit in FRUIT
]


def test_the_nearest_passages_come_with_the_gold_one(write: Write, words: EmbeddingRetriever) -> None:
    found = load(write(SQUAD), passages=3, retriever=words)
    assert len(found.examples) == 12
    for example in found.examples:
        title, fruit = example.id.split("-")
        assert {p.text for p in example.passages} == {f"{other} {fruit} {fruit}." for other in TITLES}
        assert [p for p in example.passages if p.gold] == [Passage(title, f"{title} {fruit} {fruit}.", gold=True)]
        assert example.answers == (title,)


def test_gold_is_kept_though_others_are_nearer(write: Write, words: EmbeddingRetriever) -> None:
    data = {"data": [article("Red"), {"paragraphs": [{"context": "Unlike.", "qas": []}]}]}
    data["data"][1]["paragraphs"][0]["qas"] = [{"question": "plum?", "answers": [{"text": "x"}]}]  # type: ignore[index]
    last = load(write(data), passages=2, retriever=words).examples[-1]
    assert {(p.text, p.gold) for p in last.passages} == {("Unlike.", True), ("Red plum plum.", False)}


def test_the_order_is_seeded(write: Write, words: EmbeddingRetriever) -> None:
    path = write(SQUAD)
    first = load(path, passages=4, retriever=words)
    again, other = (load(path, passages=4, seed=seed, retriever=words) for seed in (0, 1))
    assert first == again
    assert first.digest != other.digest
    for one, two in zip(first.examples, other.examples, strict=True):
        assert set(one.passages) == set(two.passages)
    places = {[p.gold for p in example.passages].index(True) for example in first.examples}
    assert len(places) > 1


def test_the_corpus_is_embedded_once_and_of_the_questions_only_the_chosen(
    write: Write, words: EmbeddingRetriever, embedder: WordEmbedder
) -> None:
    found = load(write(SQUAD), limit=3, retriever=words)
    assert [e.id for e in found.examples] == ["Red-apple", "Blue-apple", "Green-apple"]
    assert embedder.texts == 12 + 3


def test_records_as_on_the_hub_are_the_same_questions(write: Write, words: EmbeddingRetriever) -> None:
    published, hub = (load(write(data), passages=3, retriever=words) for data in (SQUAD, ROWS))
    assert published.examples == hub.examples
    listed = load(write(SQUAD["data"]), passages=3, retriever=words)
    assert listed.examples == hub.examples


def test_a_small_corpus_and_one_passage(write: Write, words: EmbeddingRetriever) -> None:
    path = write({"data": [article("Red")]})
    assert {len(e.passages) for e in load(path, passages=9, retriever=words).examples} == {4}
    for example in load(path, passages=1, retriever=words).examples:
        assert [p.gold for p in example.passages] == [True]


def test_a_paragraph_that_comes_twice_is_one_passage(write: Write, words: EmbeddingRetriever) -> None:
    found = load(write({"data": [article("Red"), article("Red")]}), passages=9, retriever=words)
    assert all(len({p.text for p in e.passages}) == len(e.passages) == 4 for e in found.examples)
    assert len({e.id for e in found.examples}) == 8


def test_questions_without_answers_are_dropped_but_their_paragraphs_are_not(
    write: Write, words: EmbeddingRetriever
) -> None:
    impossible = {**ROWS[4], "answers": {"text": [], "answer_start": []}}
    found = load(write([ROWS[0], impossible, {**ROWS[8], "context": " "}]), retriever=words)
    (example,) = found.examples
    assert {p.title for p in example.passages} == {"Red", "Blue"}
    assert found.dropped == {"no answers": 1, "no passages": 1, "blank passages": 1}


@pytest.mark.parametrize(
    ("paragraph", "place"),
    [
        ({"qas": []}, "paragraphs 1, context"),
        ({"context": "c"}, "paragraphs 1, qas"),
        ({"context": "c", "qas": [{"question": "q"}]}, "paragraphs 1, qas 1, answers"),
        ({"context": "c", "qas": [{"question": "q", "answers": [{}]}]}, "paragraphs 1, qas 1, answers.text"),
        ({"context": "c", "qas": ["q"]}, "paragraphs 1, qas 1"),
    ],
)
def test_faults_are_told_with_their_place(write: Write, paragraph: object, place: str) -> None:
    with pytest.raises(InvalidInput, match=rf"data\.json, record 1, {place}"):
        load(write({"data": [{"title": "t", "paragraphs": [paragraph]}]}))


@pytest.mark.slow
def test_the_packaged_embedding_model_retrieves_by_default(write: Write) -> None:
    other = {"title": "Sea", "paragraphs": [{"context": "A harbor pilot guides ships into port.", "qas": []}]}
    fruit = {"title": "Food", "paragraphs": [{"context": "Apple trees bear red apples.", "qas": []}]}
    asked = {
        "title": "Farm",
        "paragraphs": [
            {"context": "Pears.", "qas": [{"question": "Which tree has apples?", "answers": {"text": "a"}}]}
        ],
    }
    (example,) = load(write({"data": [other, fruit, asked]}), passages=2).examples
    assert {(p.title, p.gold) for p in example.passages} == {("Food", False), ("Farm", True)}

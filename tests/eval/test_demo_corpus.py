"""The demo corpus that ships inside `blend.eval`: its documents, its questions, and the evidence that joins them."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

DEMO = files("blend.eval") / "demo"
QUESTION_FIELDS = {"id", "question", "answers", "documents"}


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    """Text of every document by file stem; strict decoding, so a byte that is not UTF-8 fails here."""
    entries = sorted((DEMO / "documents").iterdir(), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".txt"): entry.read_bytes().decode("utf-8") for entry in entries}


@pytest.fixture(scope="module")
def questions() -> list[dict[str, Any]]:
    """The records of `questions.json`, in file order."""
    records: list[dict[str, Any]] = json.loads((DEMO / "questions.json").read_bytes().decode("utf-8"))
    return records


def test_forty_text_files_numbered_without_gaps(documents: dict[str, str]) -> None:
    assert all(entry.name.endswith(".txt") for entry in (DEMO / "documents").iterdir())
    assert [stem.split("-", 1)[0] for stem in documents] == [f"{number:02d}" for number in range(1, 41)]


def test_each_document_is_a_title_an_empty_line_and_paragraphs(documents: dict[str, str]) -> None:
    for stem, text in documents.items():
        title, empty, *body = text.split("\n")
        assert title and title == title.strip() and not title.endswith("."), stem
        assert empty == "" and body[0], stem
        assert text.endswith("\n") and not text.endswith("\n\n") and "\r" not in text, stem
        paragraphs = text.rstrip("\n").split("\n\n")[1:]
        assert len(paragraphs) >= 2, stem
        assert all("\n" not in paragraph and paragraph.endswith(".") for paragraph in paragraphs), stem


def test_documents_stay_short(documents: dict[str, str]) -> None:
    lengths = {stem: len(text.split()) for stem, text in documents.items()}
    assert {stem: length for stem, length in lengths.items() if not 120 <= length <= 260} == {}


def test_no_two_documents_share_a_title_or_a_paragraph(documents: dict[str, str]) -> None:
    titles = Counter(text.split("\n", 1)[0].casefold() for text in documents.values())
    paragraphs = Counter(part for text in documents.values() for part in text.strip().split("\n\n")[1:])
    assert max(titles.values()) == 1
    assert max(paragraphs.values()) == 1


def test_twenty_questions_with_unique_ids_and_wording(questions: list[dict[str, Any]]) -> None:
    assert len(questions) == 20
    assert all(set(question) == QUESTION_FIELDS for question in questions)
    assert len({question["id"] for question in questions}) == 20
    assert len({question["question"].casefold() for question in questions}) == 20
    assert all(question["question"].endswith("?") for question in questions)


def test_fourteen_questions_need_one_document_and_six_need_two(questions: list[dict[str, Any]]) -> None:
    assert Counter(len(set(question["documents"])) for question in questions) == {1: 14, 2: 6}
    for question in questions:
        assert question["id"].startswith("single-" if len(question["documents"]) == 1 else "two-hop-"), question["id"]


def test_evidence_documents_exist(documents: dict[str, str], questions: list[dict[str, Any]]) -> None:
    assert {stem for question in questions for stem in question["documents"]} <= set(documents)


def test_answers_are_short_and_stand_verbatim_in_the_evidence(
    documents: dict[str, str], questions: list[dict[str, Any]]
) -> None:
    for question in questions:
        assert question["answers"], question["id"]
        assert len(set(question["answers"])) == len(question["answers"]), question["id"]
        for answer in question["answers"]:
            assert answer == answer.strip() and 1 <= len(answer.split()) <= 4, (question["id"], answer)
            assert any(answer in documents[stem] for stem in question["documents"]), (question["id"], answer)


def test_a_two_hop_answer_stands_in_the_last_evidence_document_only(
    documents: dict[str, str], questions: list[dict[str, Any]]
) -> None:
    for question in questions:
        first, last = question["documents"][0], question["documents"][-1]
        if first == last:
            continue
        for answer in question["answers"]:
            assert answer in documents[last] and answer not in documents[first], (question["id"], answer)

"""MuSiQue as published (Trivedi et al., 2022): one question a line, with 20 paragraphs of which some support it."""

from __future__ import annotations

from collections.abc import Iterable

from blend.eval.datasets.questions import Example, Found
from blend.eval.datasets.records import Record


def recognises(record: Record) -> bool:
    """Whether a record is of this format."""
    return "paragraphs" in record and "question" in record


def read(records: Iterable[Record]) -> Found:
    """Return the questions with all of their paragraphs. One that is marked as not answerable has no answers."""
    return Found([_example(record) for record in records])


def _example(record: Record) -> Example:
    answers: list[str] = []
    if "answerable" not in record or record.truth("answerable"):
        answers += record.texts("answer")
        answers += record.texts("answer_aliases") if "answer_aliases" in record else []
    gold = "is_supporting" if _labelled(record) else ""
    passages = record.passages("paragraphs", text="paragraph_text", gold=gold)
    return Example(record.text("id") if "id" in record else "", record.text("question"), tuple(answers), passages)


def _labelled(record: Record) -> bool:
    return any("is_supporting" in paragraph for paragraph in record.parts("paragraphs"))

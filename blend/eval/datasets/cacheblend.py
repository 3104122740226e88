"""The format of the CacheBlend paper's data: ``question``, ``answers``, ``ctxs: [{title, text}]``."""

from __future__ import annotations

from collections.abc import Iterable

from blend.eval.datasets.questions import Example, Found
from blend.eval.datasets.records import Record


def recognises(record: Record) -> bool:
    """Whether a record is of this format."""
    return "ctxs" in record


def read(records: Iterable[Record]) -> Found:
    """Return the questions with all of their own passages in the file's order. Answers may be nested."""
    return Found([_example(record) for record in records])


def _example(record: Record) -> Example:
    name = record.text("id") if "id" in record else ""
    return Example(name, record.text("question"), tuple(record.texts("answers")), record.passages("ctxs"))

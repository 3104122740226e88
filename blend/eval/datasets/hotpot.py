"""HotpotQA (Yang et al., 2018) and 2WikiMultihopQA (Ho et al., 2020), as published and as the hub has them.

Published: ``context: [[title, [sentence]]]``, ``supporting_facts: [[title, sentence number]]``. On the hub, both are
objects of lists: ``context: {title: [], sentences: [[]]}``, ``supporting_facts: {title: [], sent_id: []}``.
"""

from __future__ import annotations

from collections.abc import Iterable

from blend.errors import InvalidInput
from blend.eval.datasets.questions import Example, Found, Passage
from blend.eval.datasets.records import Record


def recognises(record: Record) -> bool:
    """Whether a record is of this format."""
    return "context" in record and isinstance(record.get("context"), list | dict)


def read(records: Iterable[Record]) -> Found:
    """Return the questions with all of their paragraphs; those that a supporting fact is of are gold."""
    return Found([_example(record) for record in records])


def _example(record: Record) -> Example:
    titles = set()
    if "supporting_facts" in record:
        titles = {fact.text("title") for fact in _pairs(record, "supporting_facts", ("title", "sent_id"))}
    passages = []
    for part in _pairs(record, "context", ("title", "sentences")):
        title = part.text("title")
        text = " ".join(sentence.strip() for sentence in part.texts("sentences"))
        passages.append(Passage(title, text, title in titles))
    name = next((record.text(field) for field in ("_id", "id") if field in record), "")
    return Example(name, record.text("question"), tuple(record.texts("answer")), tuple(passages))


def _pairs(record: Record, path: str, names: tuple[str, str]) -> list[Record]:
    """The items of a list as records with these two fields, whether they are pairs or objects."""
    found = []
    for i, item in enumerate(record.items(path), 1):
        place = f"{record.place}, {path} {i}"
        if isinstance(item, list):
            if len(item) != len(names):
                raise InvalidInput(place, f"a list of {len(item)}", f"a pair: {' and '.join(names)}")
            item = dict(zip(names, item, strict=True))
        found.append(Record(place, item))
    return found

"""Any other JSON: the caller says which field is what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blend.errors import InvalidInput
from blend.eval.datasets.questions import Example, Found
from blend.eval.datasets.records import Record
from blend.names import unknown

FIELDS = ("id", "question", "answers", "passages", "title", "text", "gold")
"""What can be named. The last three are looked for in each passage."""

_DEFAULTS = {"question": "question", "answers": "answers", "passages": "passages", "title": "title", "text": "text"}


def check(fields: Mapping[str, str]) -> None:
    """Raise :class:`~blend.errors.InvalidInput` for a map of other names than :data:`FIELDS`, or to no path."""
    for name, path in fields.items():
        if name not in FIELDS:
            raise unknown("fields", name, FIELDS)
        if not isinstance(path, str) or not path:
            raise InvalidInput(f"fields, {name}", path, "the path of a field, such as answer.text")


def read(records: Iterable[Record], fields: Mapping[str, str]) -> Found:
    """Return the questions with all of their passages, in the file's order.

    Args:
        records: the records.
        fields: paths by name of :data:`FIELDS`. ``question``, ``answers``, ``passages``, ``title`` and ``text``
            stand under their own names where the map has none; a passage may be a text alone.
    """
    path = {**_DEFAULTS, **fields}
    found = []
    for record in records:
        passages = record.passages(
            path["passages"],
            title=path["title"],
            text=path["text"],
            gold=fields.get("gold", ""),
            titled="title" in fields,
        )
        name = record.text(path["id"]) if "id" in fields else record.text("id") if "id" in record else ""
        found.append(Example(name, record.text(path["question"]), tuple(record.texts(path["answers"])), passages))
    return Found(found)

"""One record of a source: named fields, and the place that a fault in them is told with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from blend.errors import InvalidInput
from blend.eval.datasets.questions import Passage

_SHOWN = 200


class Record:
    """Named fields, read by path: ``a.b`` is field ``b`` of field ``a``, or of every item of the list ``a``.

    Args:
        place: names the record in messages, such as ``questions.json, record 3``.
        fields: the record as JSON has it.

    Raises:
        InvalidInput: ``fields`` is no object. All methods raise it for fields that are missing or of a wrong type.
    """

    def __init__(self, place: str, fields: object) -> None:
        if not isinstance(fields, Mapping):
            raise InvalidInput(place, type(fields).__name__, "an object with named fields")
        self.place = place
        self.fields: Mapping[str, Any] = fields

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    @property
    def names(self) -> str:
        """The names of the fields, as messages show them."""
        listed = ", ".join(self.fields) or "none"
        return listed if len(listed) <= _SHOWN else listed[:_SHOWN] + " ..."

    def get(self, path: str) -> Any:
        """Return what stands under ``path``; along lists, the list of what stands under each item."""
        if path in self.fields:
            return self.fields[path]
        found: Any = self.fields
        for step in path.split("."):
            found = self._step(found, step, path)
        return found

    def text(self, path: str) -> str:
        """Return a text; a number as text, null as the empty text."""
        return self._as_text(self.get(path), path)

    def texts(self, path: str) -> list[str]:
        """Return the texts under ``path``: one, or a list nested as deep as it likes. Null is none."""
        return [self._as_text(item, path) for item in _flat(self.get(path)) if item is not None]

    def items(self, path: str) -> list[Any]:
        """Return the items of a list. An object of lists of one length, as the hub stores lists of objects, is one."""
        value = self.get(path)
        if isinstance(value, Mapping):
            columns = [column for column in value.values() if isinstance(column, list)]
            if columns and len(columns) == len(value) and len({len(column) for column in columns}) == 1:
                return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
        if not isinstance(value, list):
            raise self._wrong(path, value, "a list, or an object of lists of one length")
        return value

    def parts(self, path: str) -> list[Record]:
        """Return the objects of a list as records."""
        return [Record(f"{self.place}, {path} {i}", item) for i, item in enumerate(self.items(path), 1)]

    def passages(
        self, path: str, *, title: str = "title", text: str = "text", gold: str = "", titled: bool = False
    ) -> tuple[Passage, ...]:
        """Return the passages of a list: texts, or objects whose fields ``title``, ``text`` and ``gold`` name.

        A title may be missing, unless ``titled``. Where ``gold`` is empty, no passage is.
        """
        found = []
        for i, item in enumerate(self.items(path), 1):
            part = Record(f"{self.place}, {path} {i}", {text: item} if isinstance(item, str) else item)
            heading = part.text(title) if titled or title in part else ""
            found.append(Passage(heading, part.text(text), part.truth(gold) if gold else False))
        return tuple(found)

    def truth(self, path: str) -> bool:
        """Return true or false; 1 and 0 are taken for them."""
        value = self.get(path)
        if value not in (True, False):
            raise self._wrong(path, value, "true or false")
        return bool(value)

    def _step(self, value: Any, step: str, path: str) -> Any:
        if isinstance(value, Mapping) and step in value:
            return value[step]
        if isinstance(value, list):
            return [self._step(item, step, path) for item in _flat(value)]
        raise InvalidInput(f"{self.place}, {path}", None, f"a value; the record's fields are: {self.names}")

    def _as_text(self, value: Any, path: str) -> str:
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._wrong(path, value, "text")
        text = str(value)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self._wrong(path, text[error.start], "characters that UTF-8 has, so no half of a pair") from error
        return text

    def _wrong(self, path: str, value: Any, allowed: str) -> InvalidInput:
        # Never the value of a container: showing it costs, and may not end.
        shown = value if isinstance(value, str | int | float | bool | None) else type(value).__name__
        return InvalidInput(f"{self.place}, {path}", shown, allowed)


def _flat(value: Any) -> Iterator[Any]:
    """The items of a list and of all lists in it, in order; what is no list is the one item."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(reversed(item))
        else:
            yield item

"""JSON files, and files with one JSON document a line; a fault names the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blend.errors import InvalidInput

_LINES = (".jsonl", ".ndjson")


def read(path: Path) -> Any:
    """Return the document in ``path``; the list of them, if the file has one a line (whatever its suffix).

    Raises:
        InvalidInput: the file cannot be read, is not UTF-8 (a byte order mark is passed over), or is not JSON; the
            message names the line.
    """
    text = _text(path)
    return _by_line(path, text) if path.suffix.lower() in _LINES or _is_by_line(text) else _parse(path, text)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInput(str(path), error.strerror, "a file that can be read") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(f"{path}, line {line}", data[error.start : error.start + 1], "text in UTF-8") from error


def _is_by_line(text: str) -> bool:
    """Whether the first line is a whole object, and not the last line."""
    first, _, rest = text.lstrip().partition("\n")
    if not rest.strip() or not first.startswith("{"):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _by_line(path: Path, text: str) -> list[Any]:
    # Not splitlines: JSON text may hold U+2028 and its like, which end no line of the file.
    lines = enumerate(text.split("\n"), 1)
    return [_parse(path, line, number) for number, line in lines if line.strip()]


def _parse(path: Path, text: str, line: int | None = None) -> Any:
    """Parse ``text``: all of the file, or its line of that number."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {line or error.lineno}, column {error.colno}"
        raise InvalidInput(place, error.msg, "JSON") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; lists of thousands of levels
        place = str(path) if line is None else f"{path}, line {line}"
        raise InvalidInput(place, str(error), "JSON with numbers and nesting of common size") from error

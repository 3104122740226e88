"""``results.json``: written whole or not at all, and checked when it is read."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blend.errors import InvalidInput, NotFound, ResourceExhausted
from blend.eval.values import Results

FILE = "results.json"
"""The document's name in a results directory."""


_LOCK = ".lock"


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other processes from writing a results directory, which is made where it is missing.

    Raises:
        ResourceExhausted: another process is writing there.
        OSError: the directory cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / _LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceExhausted(f"{directory} is being written by another process") from error
        yield


def dumps(document: Any, indent: int | None = 1) -> str:
    """Return a JSON document with sorted keys and a line end; what JSON cannot say (NaN, say) is refused.

    ``indent=None`` gives one line.

    Raises:
        InvalidInput: a value has no place in JSON.
    """
    try:
        return json.dumps(document, sort_keys=True, ensure_ascii=False, indent=indent, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InvalidInput("results", str(error), "finite numbers, texts, lists and names with values") from error


def write(directory: Path, results: Results) -> Path:
    """Write a document into ``directory``, which is made where it is missing; returns the file's path.

    The file is replaced in one step: whoever reads it, and whatever interrupts this, finds the old one or the new one.

    Raises:
        OSError: the directory cannot be written to.
    """
    text = dumps(results.as_dict())
    directory.mkdir(parents=True, exist_ok=True)
    replace(directory / FILE, text)
    return directory / FILE


def replace(path: Path, text: str) -> None:
    """Replace a file's text, in UTF-8, in one step that lasts.

    Raises:
        OSError: its directory cannot be written to.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # beside it, with the user's own mode
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: str | Path) -> Results:
    """Return the document in ``path``: a results directory, or the file itself.

    Raises:
        NotFound: there is none.
        InvalidInput: not JSON (with the line), not such a document, or one of a newer version.
        OSError: it cannot be read.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise NotFound("results of blend-eval", str(file))
    try:
        raw = json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInput(str(file), f"line {error.lineno}: {error.msg}", "a whole JSON document") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(file), str(error), "a JSON document in UTF-8") from error
    return Results.from_dict(raw, str(file))

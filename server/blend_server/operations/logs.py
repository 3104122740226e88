"""Logs on standard error: a line of ``key=value`` pairs, or an object of JSON.

Neither holds the message of an exception that was not raised on purpose, for it may quote a document: a line has the
types of such an error and where it came from.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from blend.config import OperationsConfig
from blend_server.operations import context

_TEXT = "time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"
_PAIRS = re.compile(r"(\w+)=(.*?)(?= \w+=|$)", re.DOTALL)
_MOST_CAUSES = 8
_MOST_FRAMES = 12


def configure(operations: OperationsConfig, stream: TextIO | None = None) -> None:
    """Have everything that is logged in this process go to ``stream``, which is standard error by default."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if operations.log_format == "json" else TextLines())
    logging.basicConfig(level=operations.log_level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """``time=… level=… logger=…`` and the message, which most often is pairs, too."""

    def __init__(self) -> None:
        super().__init__(_TEXT, datefmt="%Y-%m-%dT%H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        if (error := _error_of(record)) is not None:
            line += f" error={types_of(error)} stack={stack_of(error)}"
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line.

    ``time``, ``level``, ``logger``, ``message``; ``request_id``, ``tenant`` and ``trace_id`` of the call that it is
    about, where there is one. A message that is all pairs has them as fields; its ``event`` is the value of the pair of
    that name, else the first pair's name.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        message = record.getMessage()
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        pairs = _pairs(message)
        if pairs:
            found["event"] = pairs.get("event", next(iter(pairs)))
        for name, variable in (
            ("request_id", context.request_id),
            ("tenant", context.tenant),
            ("trace_id", context.trace_id),
        ):
            if (value := variable.get()) not in ("", "-"):
                found[name] = value
        if (error := _error_of(record)) is not None:
            found.update(error=types_of(error), stack=stack_of(error))
        for name, value in pairs.items():
            found.setdefault(name, value)
        return json.dumps(found, ensure_ascii=False)


def types_of(error: BaseException) -> str:
    """Return ``KeyError<-OSError``: the error's type, then those of what it was raised from."""
    names: list[str] = []
    current: BaseException | None = error
    while current is not None and len(names) < _MOST_CAUSES:
        names.append(type(current).__name__)
        current = current.__cause__ or current.__context__
    return "<-".join(names)


def stack_of(error: BaseException) -> str:
    """Return ``file:line:function`` of the innermost frames, outermost first, without any values."""
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
    return "|".join(f"{Path(f.filename).name}:{f.lineno}:{f.name}" for f in frames)


def _error_of(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _pairs(message: str) -> dict[str, str]:
    """The pairs of a message that is nothing else; a value goes on to the next pair's name."""
    return dict(_PAIRS.findall(message)) if re.match(r"\w+=", message) else {}

"""The audit log: who did what to which document, and how that ended.

A line of JSON for each call, and one for each document that it takes in; a call that is cancelled once its document
was changed has both lines.

It holds no text of any document, title or question, and no secret.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from blend.errors import InvalidConfig

logger = logging.getLogger("blend_server.audit")
"""Where the lines go, at level INFO; other handlers may be added."""
logger.addHandler(logging.NullHandler())
logger.setLevel(logging.INFO)
logger.propagate = False

_MAX_DOCUMENT = 256


class Failures:
    """How many lines could not be written since the process began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        """Count one."""
        with self._lock:
            self.count += 1


failures = Failures()
"""Those of every log of this process."""


class Entry:
    """One call. ``document`` is the one that it is about; tenant and caller are not known before it is identified."""

    def __init__(self, method: str, request_id: str, peer: str) -> None:
        self.tenant: str | None = None
        self.caller: str | None = None
        self.document: str | None = None
        self._changed: str | None = None
        self._method = method
        self._request_id = request_id
        self._peer = peer

    def changed(self, document: str) -> None:
        """Write that a document was changed, as soon as it is: that stays so, whatever becomes of the call."""
        self._changed = document
        self.write("OK", document)

    def ended(self, code: str) -> None:
        """Write how the call ended, unless the change of its document said so already."""
        if code != "OK" or self.document is None or self.document != self._changed:
            self.write(code)

    def write(self, code: str, document: str | None = None) -> None:
        """Write a line about the call, or about one document of those that it takes."""
        about = document if document is not None else self.document
        fields = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": self._request_id,
            "tenant": self.tenant,
            "caller": self.caller,
            "method": self._method,
            "code": code,
            "document": None if about is None else about[:_MAX_DOCUMENT],
            "peer": self._peer,
        }
        logger.info("%s", json.dumps(fields))


current: ContextVar[Entry] = ContextVar("current")
"""The entry of the call that this task serves."""


@contextmanager
def written(path: str | Path | None) -> Iterator[None]:
    """Write the log to a file, or for ``-`` to standard error, inside the ``with`` block; ``None`` does nothing.

    The file is appended to, made with mode 0600, and opened anew when it was moved away.

    Raises:
        InvalidConfig: the file cannot be written.
    """
    if path is None:
        yield
        return
    try:
        handler = _Stream(sys.stderr) if str(path) == "-" else _File(Path(path).expanduser())
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror}), or - for standard error"
        raise InvalidConfig("security.audit_file", str(path), allowed) from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if isinstance(handler, _File):
            handler.close()


class _Counted(logging.Handler):
    """Counts the lines that it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Count the line, and have logging tell."""
        failures.add()
        super().handleError(record)


class _Stream(_Counted, logging.StreamHandler):  # type: ignore[type-arg] # Python 3.10 has no argument for it
    pass


class _File(_Counted, WatchedFileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. A file that cannot be opened anew fails no call: logging tells, the next line tries again."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, how: os.open(path, how, 0o600))

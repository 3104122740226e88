"""What a run has measured so far, line by line, so that one that was stopped goes on where it stood."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from blend.decoding import decode, encode
from blend.errors import InvalidInput
from blend.eval.results import dumps, held
from blend.eval.values import VERSION, Heatmap, Identity, PromptKey, Record
from blend.versions import Environment

FILE = "records.jsonl"
"""The journal's name in a results directory."""


@dataclass(frozen=True)
class Header:
    """What a journal's records are of.

    Args:
        settings: all that the measurement depends on.
        identity, environment: of what measures, and where.
        asked: all prompts that are to be measured, in order.
        dropped: by reason, how many cannot be.
        version: of the records.
    """

    settings: Mapping[str, object]
    identity: Identity
    environment: Environment
    asked: tuple[PromptKey, ...]
    dropped: Mapping[str, int]
    version: int = VERSION


class Journal:
    """The file ``records.jsonl`` of a results directory, which it holds against other processes; a context manager.

    Its first line is a header: what is measured. Each further line is one record, or the heatmap, written as soon as
    it is there. A last line that was cut off is dropped; whatever else is wrong is refused.

    Args:
        directory: made where it is missing.
        restart: begin anew, whatever the file holds.

    Attributes:
        header: what the first line says, or ``None`` in a new file.
        records: those that the file held, and those that were added.
        heatmap: the one that the file held, or that was added.

    Raises:
        InvalidInput: a line that is no record, with its number.
        ResourceExhausted: another process is writing there.
        OSError: it cannot be read or written.
    """

    def __init__(self, directory: Path, *, restart: bool = False) -> None:
        self.path = directory / FILE
        self.header: Header | None = None
        self.records: list[Record] = []
        self.heatmap: Heatmap | None = None
        with ExitStack() as stack:
            stack.enter_context(held(directory))
            self._file = stack.enter_context(open(self.path, "a+b"))
            if restart:
                self._file.truncate(0)
            self._read()
            self._open = stack.pop_all()

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # cut off while it was written
            self._take(number, line)
            whole += len(line)
        self._file.truncate(whole)

    def _take(self, number: int, line: bytes) -> None:
        where = f"{self.path}: line {number}"
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                where, str(error), "JSON, as written by blend-eval (or begin anew: --restart)"
            ) from error
        kind, value = next(iter(raw.items())) if isinstance(raw, dict) and len(raw) == 1 else ("", raw)
        if number == 1:
            version = value.get("version") if isinstance(value, dict) else None
            if kind != "header" or version != VERSION:
                found = f"a header of version {version}" if kind == "header" else kind or raw
                raise InvalidInput(where, found, f"a header of version {VERSION} (or begin anew: --restart)")
            self.header = decode(Header, value, where)
        elif kind == "record":
            self.records.append(decode(Record, value, where))
        elif kind == "heatmap":
            self.heatmap = decode(Heatmap, value, where)
        else:
            raise InvalidInput(where, kind or raw, "a record or a heatmap (or begin anew: --restart)")

    def begin(self, header: Header) -> None:
        """Write the first line of a new file."""
        if self.header is not None:
            raise InvalidInput("header", "a second one", "one header a journal")
        self._write("header", encode(header))
        self.header = header

    def check(
        self,
        *,
        settings: Mapping[str, object] | None = None,
        identity: Identity | None = None,
        environment: Environment | None = None,
    ) -> None:
        """Compare the header, where there is one, with what is to be measured now, and where.

        Raises:
            InvalidInput: they differ; the message says in what.
        """
        if self.header is None:
            return
        differ: dict[str, str] = {}
        compared = (
            (self.header.settings, settings),
            (self.header.identity, identity),
            (self.header.environment, environment),
        )
        for there, now in compared:
            if now is not None:
                old, new = encode(there), encode(now)
                for name in sorted(old.keys() | new.keys()):
                    if old.get(name) != new.get(name):
                        differ[name] = f"{name} was {_short(old.get(name))}, is {_short(new.get(name))}"
        if differ:
            allowed = "results of the same settings and machine, another directory, or --restart"
            raise InvalidInput(f"{self.path.parent}: {', '.join(differ)}", "; ".join(differ.values()), allowed)

    def check_records(self, planned: Collection[tuple[str, float | None]]) -> None:
        """Refuse records of other prompts than the header's, or of other methods and ratios than ``planned``.

        Raises:
            InvalidInput: there are such records, or one comes twice.
        """
        asked = set() if self.header is None else set(self.header.asked)
        for key, times in Counter(record.key for record in self.records).items():
            if times > 1 or key[:4] not in asked or key[4:] not in planned:
                found = f"a record of {key}" + (f", {times} times" if times > 1 else "")
                raise InvalidInput(str(self.path), found, "what was asked for, each once (or begin anew: --restart)")

    def add(self, record: Record) -> None:
        """Write a record; it outlives this process from now on."""
        self._write("record", encode(record))
        self.records.append(record)

    def add_heatmap(self, heatmap: Heatmap) -> None:
        """Write the heatmap."""
        self._write("heatmap", encode(heatmap))
        self.heatmap = heatmap

    def _write(self, kind: str, value: Any) -> None:
        self._file.write(dumps({kind: value}, indent=None).encode())
        self._file.flush()
        if kind == "header":
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file and the directory. Safe to call again."""
        self._open.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

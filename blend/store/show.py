"""What the command ``blend-store`` prints: tables, progress bars, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

T = TypeVar("T")
Track = Callable[[Sequence[T], str], Iterable[T]]
_TEXTS = ("", "key", "namespace", "problem", "dtype")


class Bars:
    """Progress bars on stderr, where somebody looks at it."""

    def __init__(self, json: bool) -> None:
        self._progress = Progress(console=Console(stderr=True), disable=json or not sys.stderr.isatty(), transient=True)

    def __enter__(self) -> Track[Any]:
        self._progress.start()
        return lambda items, text: self._progress.track(items, total=len(items), description=text)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def print_found(found: Mapping[str, Any], as_json: bool) -> None:
    """Print what was found: as a table, or as one JSON document."""
    if as_json:
        print_json(found)
        return
    rows = [
        [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value] for name, value in found.items()
    ]
    rows = [row for row in rows if not isinstance(row[1], dict)]
    problems = found.get("problems")
    if problems is not None:
        rows += [["problems", len(problems)], *problems.items()]
    for tenant, usage in found.get("tenants", {}).items():
        quota = usage["quota_bytes"]
        of = "" if quota is None else f" of {quota:,}"
        rows.append([f"tenant {tenant}", f"{usage['used_bytes']:,}{of}"])
    print_table("", ["", ""], rows, header=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], header: bool = True) -> None:
    """Print a table for people."""
    table = Table(title=title or None, show_header=header)
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXTS else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    Console(file=sys.stdout).print(table)


def print_json(found: Mapping[str, Any]) -> None:
    """Print one JSON document on one line."""
    sys.stdout.write(json.dumps(found) + "\n")

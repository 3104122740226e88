"""A progress bar for work that tells how much of it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def bar(what: str, total: int | None = None, done: int = 0, *, show: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function that moves a bar, with time left, to how much is done; on standard error.

    Args:
        total: how many there are to do, some of which may be ``done`` already; without it, shares from 0 to 1 are told.
    """
    counted: ProgressColumn = TaskProgressColumn() if total is None else MofNCompleteColumn()
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        counted,
        TextColumn("spent"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show, speed_estimate_period=3600) as progress:
        task = progress.add_task(what, total=1.0 if total is None else total, completed=done)
        yield lambda told: progress.update(task, completed=told)

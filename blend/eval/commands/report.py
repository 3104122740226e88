"""``blend-eval report``: results as one HTML page."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from blend.errors import InvalidInput
from blend.eval.report import render
from blend.eval.results import dumps, read, replace
from blend.eval.settings import CommandSettings, setting

HELP = "make one self-contained HTML page from results"

EXAMPLES = """\
blend-eval report results/demo
blend-eval report results/run results/robustness results/perf --output page.html --title "SmolLM2 on our documents"
"""


@dataclass(frozen=True)
class ReportSettings(CommandSettings):
    """What ``blend-eval report`` takes.

    Raises:
        InvalidInput: no results are named.
    """

    results: tuple[str, ...] = setting((), "results directories, or results.json files", positional=True)
    output: str = setting("report.html", "the page; what is there is replaced")
    title: str | None = setting(None, "the page's title")

    def __post_init__(self) -> None:
        if not self.results:
            raise InvalidInput("results", "none", "one results directory or more")


SETTINGS = ReportSettings


def run(settings: ReportSettings, console: Console) -> int:
    """Write the page; returns the exit code 0.

    Raises:
        NotFound: no results where they are said to be.
        InvalidInput: a file that holds no results, or an output that is no file or lies in no directory.
        OSError: the page cannot be written.
    """
    output = Path(settings.output)
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise InvalidInput("output", settings.output, "a file in a directory that can be written to")
    page = render([read(path) for path in settings.results], title=settings.title)
    replace(output, page)
    if settings.json:
        sys.stdout.write(dumps({"output": settings.output, "bytes": len(page.encode())}))
    else:
        console.print(f"{settings.output}: {len(page.encode()) // 1024} KiB")
    return 0

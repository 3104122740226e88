"""``blend-eval run``: methods at ratios over a data set, each held against full prefill."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console

from blend.eval.measuring import collect
from blend.eval.results import dumps
from blend.eval.settings import Settings
from blend.eval.tables import show

HELP = "measure methods over a data set, question by question"

EXAMPLES = """\
blend-eval run --dataset demo --methods reuse,deviation,query --ratios 0.15
blend-eval run --dataset musique.json --limit 20 --methods full,reuse,head,query --results out   # again: goes on
blend-eval run --config quality.yaml --json
"""


@dataclass(frozen=True)
class RunSettings(Settings):
    """Settings of ``run``."""


SETTINGS = RunSettings


def run(settings: RunSettings, console: Console) -> int:
    """Measure, and print tables or the document of results."""
    found = collect("run", settings)
    if settings.json:
        sys.stdout.write(dumps(found.as_dict()))
    else:
        show(console, found)
    return 0

"""``blend-eval sweep``: quality and time to first token against the ratio, from nothing to 0.6."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console

from blend.eval.measuring import collect
from blend.eval.results import dumps
from blend.eval.settings import Settings, setting
from blend.eval.tables import show

HELP = "quality and time to first token against the ratio"

EXAMPLES = """\
blend-eval sweep --dataset demo --methods deviation,query --results out
blend-eval sweep --dataset questions.json --limit 20 --ratios 0,0.1,0.2,0.3 --json
"""


@dataclass(frozen=True)
class SweepSettings(Settings):
    """Settings of ``sweep``."""

    ratios: tuple[float, ...] = setting(
        (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6), "shares of cached tokens, 0 to 1, with commas between"
    )


SETTINGS = SweepSettings


def run(settings: SweepSettings, console: Console) -> int:
    """Measure every ratio, and print tables or the document of results."""
    found = collect("sweep", settings)
    if settings.json:
        sys.stdout.write(dumps(found.as_dict()))
    else:
        show(console, found)
    return 0

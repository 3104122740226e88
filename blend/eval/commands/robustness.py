"""``blend-eval robustness``: the same evidence in other orders and places, and cut into other chunks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from blend.engine import Engine
from blend.eval.datasets import Example
from blend.eval.measuring import collect
from blend.eval.methods import names
from blend.eval.metrics import METRICS
from blend.eval.prompts import Asked, layout
from blend.eval.results import dumps
from blend.eval.robustness import EXPERIMENTS, POSITIONS, Options, variations
from blend.eval.settings import Settings, setting
from blend.eval.spread import ANSWERS, SPREAD
from blend.eval.values import Results, Row

HELP = "the same evidence in other orders, places and chunks"

EXAMPLES = """\
blend-eval robustness --dataset demo --methods reuse,query --results out   # again: goes on
blend-eval robustness --dataset questions.json --limit 20 --experiments order --orders 8
blend-eval robustness --experiments chunk-size,count --chunk-sizes 64,512 --counts 2,20 --json
"""

_SHOWN = ("f1", "answer_kl", "top1")


@dataclass(frozen=True)
class RobustnessSettings(Settings):
    """Settings of ``robustness``.

    Raises:
        InvalidInput: a value outside what is allowed.
    """

    methods: tuple[str, ...] = setting(("reuse", "head", "query"), f"with commas between, of {', '.join(names())}")
    experiments: tuple[str, ...] = setting(EXPERIMENTS, "what is varied, with commas between")
    orders: int = setting(4, "orders of the same passages, the data's among them")
    positions: tuple[str, ...] = setting(POSITIONS, "where the evidence goes")
    chunk_sizes: tuple[int, ...] = setting((64, 128, 256, 512), "tokens of a chunk, the passages' text as it is")
    counts: tuple[int, ...] = setting((2, 5, 10, 20), "chunks that the passages' text is cut into")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options()

    def options(self) -> Options:
        """Return what is varied."""
        return Options(self.experiments, self.orders, self.positions, self.chunk_sizes, self.counts, self.seed)


SETTINGS = RobustnessSettings


def run(settings: RobustnessSettings, console: Console) -> int:
    """Measure every variation, and print a table an experiment or the document of results."""

    def vary(engine: Engine, example: Example, dropped: Counter[str]) -> Iterator[Asked]:
        return variations(example, settings.options(), engine.tokenize, layout(engine).build, dropped)

    found = collect("robustness", settings, vary)
    if settings.json:
        sys.stdout.write(dumps(found.as_dict()))
    else:
        _show(console, found)
    return 0


def _show(console: Console, found: Results) -> None:
    for condition in dict.fromkeys(row.condition for row in found.rows):
        rows = [row for row in found.rows if row.condition == condition]
        console.print(_table(condition, rows, found))
    for reason, count in found.dropped.items():
        console.print(f"dropped, {reason}: {count}", soft_wrap=True)


def _table(condition: str, rows: list[Row], found: Results) -> Table:
    metrics = [name for name in _SHOWN if any(name in row.metrics for row in rows)]
    spreads = [name for name in (f"{SPREAD}f1", ANSWERS) if name in rows[0].metrics]
    table = Table(
        title=f"{condition}: {found.identity.name} ({found.identity.dtype}) on {found.settings['dataset']}, "
        f"seed {found.seed}",
        caption="means with 95% intervals, clustered by question"
        + ("; ± is the standard deviation over a question's orders" if spreads else ""),
    )
    headings = [METRICS[name].title for name in metrics]
    headings += ["other answers" if name == ANSWERS else f"± {METRICS[name[len(SPREAD) :]].title}" for name in spreads]
    for heading in ("method", "ratio", "level", "questions", *headings):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in sorted(rows, key=lambda row: (row.method != "full", row.method, row.ratio or 0.0)):
        table.add_row(
            row.method,
            "" if row.ratio is None else f"{row.ratio:g}",
            "" if row.level is None else str(row.level),
            str(row.questions),
            *(str(row.metrics[name]) if name in row.metrics else "" for name in (*metrics, *spreads)),
        )
    return table

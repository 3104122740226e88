"""``blend-eval compare A B``: two results of the same prompts, paired by question, and gates for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from blend.decoding import encode
from blend.errors import InvalidInput
from blend.eval import gates, results
from blend.eval.comparison import Compared, compare, name_of, only_in
from blend.eval.metrics import METRICS
from blend.eval.settings import CommandSettings, setting
from blend.eval.tables import chance, signed, worth
from blend.eval.values import VERSION, Results

HELP = "compare two results of the same prompts; exit code 1 where a gate is not met"

EXAMPLES = """\
blend-eval compare before after
blend-eval compare before after --methods query --ratios 0.15 --gate 'kl<=0.03,f1_drop<=0.02'

A gate is NAME<=NUMBER (or >=, <, >) and holds of B's means in every row that is compared. NAME is a metric (kl is
first_kl), charged, ttft_p50 or ttft_p95; with _drop behind it, how far B is below A, with _rise, how far above.
With a gate, B must have every row of A, or of the methods and ratios that are named.
"""


@dataclass(frozen=True)
class CompareSettings(CommandSettings):
    """Settings of ``compare``."""

    a: str = setting("", "results directory or file that is compared with", positional=True)
    b: str = setting("", "results directory or file that is compared", positional=True)
    gate: str | None = setting(None, "conditions that B has to meet, with commas between")
    methods: tuple[str, ...] = setting((), "methods that are compared (default: all that both have)")
    ratios: tuple[float, ...] = setting((), "ratios that are compared (default: all that both have)")

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            if not getattr(self, name):
                raise InvalidInput(name.upper(), "nothing", "two results: blend-eval compare A B")


SETTINGS = CompareSettings


def run(settings: CompareSettings, console: Console) -> int:
    """Compare, and print tables or one JSON document. Returns 1 where a gate is not met."""
    wanted = () if settings.gate is None else gates.parse(settings.gate)
    a, b = results.read(settings.a), results.read(settings.b)
    rows = compare(a, b, methods=settings.methods, ratios=settings.ratios)
    only = {
        name: only_in(one, other, methods=settings.methods, ratios=settings.ratios)
        for name, one, other in (("A", a, b), ("B", b, a))
    }
    gates.check(wanted, a, b, left_out=only["A"])
    verdicts = gates.judge(wanted, rows)
    left_out = {name: [name_of(row) for row in found] for name, found in only.items()}
    if settings.json:
        sys.stdout.write(results.dumps(_document(settings, b, rows, left_out, verdicts)))
    else:
        _show(console, settings, b, rows, left_out, verdicts)
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _document(
    settings: CompareSettings,
    b: Results,
    rows: Sequence[Compared],
    left_out: Mapping[str, Sequence[str]],
    verdicts: Sequence[gates.Verdict],
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "kind": "compare",
        "command": settings.line("compare"),
        "identity": encode(b.identity),
        "seed": b.seed,
        "rows": [
            {
                "condition": row.a.condition,
                "level": row.a.level,
                "method": row.a.method,
                "ratio": row.a.ratio,
                "questions": row.b.questions,
                "differences": encode(row.differences),
            }
            for row in rows
        ],
        "only_in": left_out,
        "gates": [{"gate": str(v.gate), "row": v.row, "value": v.value, "passed": v.passed} for v in verdicts],
        "passed": all(v.passed for v in verdicts),
    }


def _show(
    console: Console,
    settings: CompareSettings,
    b: Results,
    rows: Sequence[Compared],
    left_out: Mapping[str, Sequence[str]],
    verdicts: Sequence[gates.Verdict],
) -> None:
    about = f"{b.identity.name} ({b.identity.dtype}), {b.questions} questions, seed {b.seed}"
    table = Table(
        title=f"B ({settings.b}) against A ({settings.a}): {about}",
        caption="B − A over the same questions, mean [95% interval]; p corrected for all tests here (Holm)",
    )
    for column in ("method", "metric", "A", "B", "B − A", "p", "what it is worth"):
        table.add_column(column, justify="right" if column in ("A", "B", "B − A", "p") else "left")
    for row in rows:
        for name, found in row.differences.items():
            table.add_row(
                row.name,
                METRICS[name].title,
                f"{row.a.metrics[name].mean:.3f}",
                f"{row.b.metrics[name].mean:.3f}",
                signed(found.difference),
                chance(found.p_holm).removeprefix("p ").removeprefix("= "),
                worth(found.noise, found.difference.count),
            )
    console.print(table)
    for side, names in left_out.items():
        if names:
            console.print(f"only in {side}, not compared: {', '.join(names)}", soft_wrap=True)
    for v in verdicts:
        line = f"gate {v.gate}, {v.row}: {v.value:.4f}: {'met' if v.passed else 'NOT MET'}"
        console.print(line, soft_wrap=True)

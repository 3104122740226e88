"""``blend-eval calibrate``: writes the calibration file that method ``auto`` reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval.fidelity import closeness, full_prefill
from blend.eval.measuring import load_dataset, open_engine, progress_bar
from blend.eval.plan import WITHOUT_RATIO, plan
from blend.eval.prompts import prepare
from blend.eval.runner import NAMESPACE
from blend.eval.settings import Settings, setting
from blend.eval.stats import bootstrap
from blend.recompute.calibration import VERSION
from blend.recompute.select import methods
from blend.types import Chunk, Plan, Prompt

HELP = "write the calibration file that method auto reads"

EXAMPLES = """\
blend-eval calibrate --dataset demo --output blend_calibration.json
"""


@dataclass(frozen=True)
class CalibrateSettings(Settings):
    """Settings of ``calibrate``."""

    methods: tuple[str, ...] = setting(("query", "head"), "with commas between")
    ratios: tuple[float, ...] = setting((0.05, 0.1, 0.15, 0.3), "shares of cached tokens that may be charged")
    output: str = setting("", "the file, blend_calibration.json in a model's directory")


SETTINGS = CalibrateSettings


def run(settings: CalibrateSettings, console: Console) -> int:
    """Measure, write the file, and print it."""
    plan(settings.methods, settings.ratios)  # names what is unknown
    for name in settings.methods:
        if name in WITHOUT_RATIO or name not in methods():
            raise InvalidInput("methods", name, "methods that select, for only they have a ratio to calibrate")
    output = Path(settings.output)
    if not settings.output or not os.access(output.parent, os.W_OK) or output.is_dir():
        raise InvalidInput("output", settings.output, "a file in a directory that can be written to")
    plans = [Plan(name, ratio, max_charged=ratio) for name in settings.methods for ratio in settings.ratios]
    found = _measure(settings, plans)
    points = [_point(p, values) for p, values in zip(plans, found, strict=True)]
    default = min(points, key=lambda p: (abs(p["ratio"] - 0.15), p["kl"]))
    written = {
        "version": VERSION,
        "model": settings.model,
        "data": f"{Path(settings.dataset).name}, {settings.passages} passages, seed {settings.seed}",
        "questions": len(found[0]),
        "default": {"method": default["method"], "ratio": default["ratio"]},
        "points": points,
    }
    output.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    if settings.json:
        sys.stdout.write(json.dumps(written) + "\n")
    else:
        console.print(_table(settings, points))
    return 0


def _measure(settings: CalibrateSettings, plans: Sequence[Plan]) -> list[list[dict[str, float]]]:
    """Return for each plan the values of each question, ``charged`` among them."""
    dataset = load_dataset(settings)
    found: list[list[dict[str, float]]] = [[] for _ in plans]
    with open_engine(settings) as engine:
        questions = prepare(engine, dataset.examples, max_new_tokens=settings.max_new_tokens).questions
        with progress_bar("questions", len(questions), 0, show=not settings.json) as step:
            for _, prompt in questions:
                for kept, values in zip(found, _question(engine, prompt, plans, settings), strict=True):
                    kept.append(values)
                step()
    return found


def _question(
    engine: Engine, prompt: Prompt, plans: Sequence[Plan], settings: CalibrateSettings
) -> list[dict[str, float]]:
    most = settings.max_new_tokens
    engine.precompute([s for s in prompt.segments if isinstance(s, Chunk)], namespace=NAMESPACE)
    prefill = engine.prefill(prompt, Plan("full"), namespace=NAMESPACE, reserve=most)
    full = full_prefill(engine, prefill, prompt.segments[-1].token_ids, most, attention=False)
    found = []
    for wanted in plans:
        blended = engine.prefill(prompt, wanted, namespace=NAMESPACE, reserve=most)
        found.append(closeness(engine, blended, (), full) | {"charged": blended.report.charged_ratio})
    return found


def _point(wanted: Plan, values: Sequence[dict[str, float]]) -> dict[str, Any]:
    kl = bootstrap([v["first_kl"] for v in values])
    return {
        "method": wanted.method,
        "ratio": wanted.ratio,
        "charged": round(sum(v["charged"] for v in values) / len(values), 4),
        "kl": round(kl.mean, 5),
        "kl_low": round(kl.low, 5),
        "kl_high": round(kl.high, 5),
        "top1": round(sum(v["top1"] for v in values) / len(values), 4),
    }


def _table(settings: CalibrateSettings, points: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{settings.model} on {settings.dataset}", caption="against full prefill; KL in nats")
    for column in ("method", "ratio", "charged", "first-token KL", "top-1"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for p in points:
        kl = f"{p['kl']:.3f} [{p['kl_low']:.3f}, {p['kl_high']:.3f}]"
        table.add_row(p["method"], f"{p['ratio']:g}", f"{p['charged']:.3f}", kl, f"{p['top1']:.3f}")
    return table

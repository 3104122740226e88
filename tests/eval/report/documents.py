"""Made-up results with everything that a page can show."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

from blend.eval.stats import Estimate
from blend.eval.values import (
    Against,
    Heatmap,
    Identity,
    Level,
    Perf,
    PerfPoint,
    Record,
    Results,
    Row,
    State,
)
from blend.versions import Environment

PARTS = {"lookup": 0.6, "fetch": 4.0, "rotate": 9.0, "select": 21.0, "recompute": 64.0, "first_token": 112.6}
KINDS: tuple[tuple[str, float | None], ...] = (
    ("full", None),
    ("prefix", None),
    ("reuse", None),
    ("closed-book", None),
    *product(("deviation", "query"), (0.05, 0.15, 0.3)),
)
IDENTITY = Identity("0f" * 32, "smollm2-135m", "float32", "a1" * 32, "b2" * 32)
ENVIRONMENT = Environment("0.2.0", "3.11.9", "2.13.0", "5.19.0", "Linux x86_64", "two cores of a test", 2, "cpu")


def loss(method: str, ratio: float | None) -> float:
    """How far a method is from full prefill here, 0 to 1."""
    start = {
        "full": 0.0,
        "prefix": 0.0,
        "reuse": 0.4,
        "closed-book": 0.9,
        "head": 0.34,
        "deviation": 0.25,
        "query": 0.18,
    }
    return start[method] * math.exp(-4 * (ratio or 0.0))


def charged(method: str, ratio: float | None) -> float:
    """The share that is computed afresh."""
    return {"full": 1.0, "prefix": 0.88, "reuse": 0.0, "closed-book": 0.0}.get(method, (ratio or 0.0) * 1.15)


def estimate(mean: float, width: float = 0.04, count: int = 20) -> Estimate:
    """A mean with an interval around it."""
    return Estimate(mean, mean - width, mean + width, count)


def row(method: str, ratio: float | None = None, condition: str = "", level: Level = None) -> Row:
    """One row with all metrics."""
    lost, share = loss(method, ratio), charged(method, ratio)
    metrics = {
        "f1": estimate(0.62 - 0.4 * lost),
        "answer_kl": estimate(0.4 * lost, 0.15 * lost),
        "top1": estimate(1 - 0.3 * lost, 0.1 * lost),
    }
    against = {}
    if method != "full":
        metrics["recovery_answer_kl"] = estimate(1 - lost / 0.4, 0.1)
        for name, difference in (("f1", estimate(-0.4 * lost, 0.05)), ("answer_kl", estimate(0.4 * lost, 0.03))):
            noise = difference.low <= 0 <= difference.high
            against[name] = Against("full", difference, 0.2 if noise else 0.001, 0.8 if noise else 0.02, noise)
    time = 40 + 560 * share
    return Row(
        method,
        ratio,
        20,
        metrics,
        share,
        ratio or share,
        {"p50": time, "p95": time * 1.2},
        {part: value * (0.3 + 4 * share) for part, value in PARTS.items()},
        condition,
        level,
        against,
        {"f1": lost < 0.1} if method != "full" else {},
    )


def record(question: int, method: str, ratio: float | None, condition: str, level: Level, order: int = 0) -> Record:
    """One answer, its metrics drawn from a seed of its own."""
    draw = random.Random(f"{question} {method} {ratio} {condition} {level} {order}")
    lost = loss(method, ratio)
    return Record(
        f"q{question}",
        method,
        ratio,
        "an answer",
        ("gold",),
        {
            "f1": min(1.0, max(0.0, draw.gauss(0.6 - 0.4 * lost, 0.2))),
            "answer_kl": abs(draw.gauss(0.4 * lost, 0.1 * lost)),
        },
        ratio or 0.0,
        ratio or 0.0,
        charged(method, ratio),
        1250,
        1200,
        method,
        PARTS,
        113.0,
        condition,
        level,
        order,
        ("no calibration for this model",) if method == "query" else (),
    )


def run() -> Results:
    """A run with a token map."""
    words = "The  river Tigris rises in the Taurus mountains .\n".split(" ")
    tokens = tuple(words[i % len(words)] + " " for i in range(180))
    chunks = ((8, 60), (64, 120), (120, 168))
    draw = random.Random(7)
    state: list[State] = ["mandatory"] * len(tokens)
    scores: list[float | None] = [None] * len(tokens)
    for start, end in chunks:
        for i in range(start, end):
            scores[i] = draw.expovariate(20)
            state[i] = "chosen" if (scores[i] or 0) > 0.09 else "cached"
    return Results(
        "run",
        "blend-eval run --dataset demo --methods full,reuse,query --ratios 0.05,0.15,0.3 --limit 20",
        {"dataset": "demo", "methods": ["full", "reuse"], "ratios": [0.05, 0.15], "margins": {"f1": 0.05}, "limit": 20},
        ENVIRONMENT,
        IDENTITY,
        20,
        {"longer than the model": 3},
        0,
        tuple(row(method, ratio) for method, ratio in KINDS),
        tuple(record(q, method, ratio, "", None) for q in range(3) for method, ratio in KINDS),
        Heatmap("q7", "query", 0.15, tokens, tuple(state), tuple(scores), chunks),
    )


def robustness() -> Results:
    """Orders, places and sizes of chunks."""
    kinds: tuple[tuple[str, float | None], ...] = (("full", None), ("reuse", None), ("query", 0.15))
    cases: list[tuple[str, Level, int]] = [("order", None, order) for order in range(4)]
    cases += [("position", place, 0) for place in ("first", "middle", "last")]
    cases += [("chunk size", size, 0) for size in (512, 64, 128)]
    levels = dict.fromkeys((condition, level) for condition, level, _ in cases)
    return replace(
        run(),
        kind="robustness",
        command="blend-eval robustness --dataset demo",
        rows=tuple(row(m, r, condition, level) for condition, level in levels for m, r in kinds),
        records=tuple(record(q, m, r, *case) for q in range(12) for m, r in kinds for case in cases),
        heatmap=None,
    )


def perf() -> Results:
    """One point or more of each experiment."""
    kinds: tuple[tuple[str, float | None], ...] = (("full", None), ("prefix", None), ("query", 0.15))
    points = [
        PerfPoint(experiment, x, method, ratio, base * cost, base * cost * 1.4, flow, 30, PARTS)
        for experiment, xs, flow in (
            ("length", (512, 1024, 2048), None),
            ("tier", ("host", "disk", "disk-cold"), None),
            ("hits", (0.0, 0.5, 1.0), None),
            ("concurrency", (1, 2, 4), 3.5),
            ("stream", (1.1,), None),
        )
        for x, base in zip(xs, (100.0, 180.0, 390.0), strict=False)
        for (method, ratio), cost in zip(kinds, (1.0, 0.8, 0.4), strict=True)
    ]
    streams = [
        {
            "skew": skew,
            "full_ms": 390.0,
            "prefix_ms": 350 - 180 * skew,
            "blended_ms": 160.0,
            "pays_against_prefix": paid,
        }
        for skew, prefix, paid in ((0.0, 350.0, 31), (0.6, 240.0, 88), (1.2, 130.0, None))
    ]
    even = {"requests": 500, "methods": [{"method": "query", "ratio": 0.15, "streams": streams}]}
    return replace(
        run(),
        kind="perf",
        command="blend-eval perf --dataset demo",
        rows=(),
        records=(),
        heatmap=None,
        perf=Perf(tuple(points), even),
    )

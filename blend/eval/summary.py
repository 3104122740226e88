"""From single records to the rows of a table: means, intervals, differences and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from blend.eval import stats
from blend.eval.metrics import METRICS
from blend.eval.plan import FULL, REUSE
from blend.eval.runner import CLOSENESS, TIMINGS
from blend.eval.spread import spread
from blend.eval.stats import Estimate
from blend.eval.values import Against, Level, Record, Row

RECOVERY = "recovery_"
"""What the names of normalized recoveries begin with."""


@dataclass(frozen=True)
class Pairs:
    """Two groups' values of one metric, of the same questions in the same orders, and the question of each pair."""

    left: tuple[float, ...]
    right: tuple[float, ...]
    questions: tuple[str, ...]

    def paired(self, seed: int) -> stats.Paired:
        """Return the mean of left − right with its interval and test. At least one pair."""
        return stats.paired(self.left, self.right, self.questions, seed=seed)


def pairs(left: Sequence[Record], right: Sequence[Record], metric: str) -> Pairs:
    """Pair records by question and order, in the order of ``left``; what either side lacks is left out."""
    others = {(r.question, r.order): r.metrics[metric] for r in right if metric in r.metrics}
    both = [r for r in left if metric in r.metrics and (r.question, r.order) in others]
    return Pairs(
        tuple(r.metrics[metric] for r in both),
        tuple(others[r.question, r.order] for r in both),
        tuple(r.question for r in both),
    )


Groups = Mapping[tuple[str, Level, str, "float | None"], Sequence[Record]]


def groups(records: Sequence[Record]) -> dict[tuple[str, Level, str, float | None], list[Record]]:
    """Return the records of each row, by the row's key, in order of their first ones."""
    found: dict[tuple[str, Level, str, float | None], list[Record]] = {}
    for record in records:
        found.setdefault((record.condition, record.level, record.method, record.ratio), []).append(record)
    return found


def summarize(records: Sequence[Record], *, margins: Mapping[str, float], seed: int) -> tuple[Row, ...]:
    """Return one row a method and ratio (and condition and level, where those vary), in order of their first records.

    Answers' scores are held against full prefill's, distances to full prefill against plain reuse's; p-values are
    corrected for all the tests of the table together.

    Args:
        margins: by metric, how much worse than full prefill passes as no worse.
        seed: of the bootstrap and the tests.
    """
    found = groups(records)
    rows = [_row(key, found, margins, seed) for key in found]
    corrected = correct([row.against for row in rows])
    return tuple(replace(row, against=against) for row, against in zip(rows, corrected, strict=True))


def correct(tables: Sequence[Mapping[str, Against]]) -> list[dict[str, Against]]:
    """Return differences with their p-values corrected for all of them together, and called noise where those say so.

    Each mapping has one row's differences by metric.
    """
    tests = [(i, name) for i, differences in enumerate(tables) for name in differences]
    ps = stats.holm([tables[i][name].p for i, name in tests])
    found: list[dict[str, Against]] = [{} for _ in tables]
    for (i, name), p in zip(tests, ps, strict=True):
        difference = tables[i][name]
        noise = stats.noise(difference.difference) or p > 1 - stats.LEVEL
        found[i][name] = replace(difference, p_holm=p, noise=noise)
    return found


def _row(key: tuple[str, Level, str, float | None], found: Groups, margins: Mapping[str, float], seed: int) -> Row:
    condition, level, method, ratio = key
    own = found[key]
    full = found.get((condition, level, FULL.method, FULL.ratio), ())
    reuse = found.get((condition, level, REUSE.method, REUSE.ratio), ())
    names = [name for name in METRICS if any(name in r.metrics for r in own)]
    ttft = np.percentile([r.ttft_ms for r in own], (50, 95))
    row = Row(
        method=method,
        ratio=ratio,
        questions=len({r.question for r in own}),
        metrics={name: _mean(own, name, seed) for name in names} | spread(own, seed=seed),
        charged=fmean(r.charged for r in own),
        selected=fmean(r.selected for r in own),
        ttft_ms={"p50": float(ttft[0]), "p95": float(ttft[1])},
        timings={name: fmean(r.timings.get(name, 0.0) for r in own) for name in TIMINGS},
        condition=condition,
        level=level,
    )
    if method == FULL.method:
        return row
    against, recovered, no_worse = {}, {}, {}
    for name in names:
        text = name not in CLOSENESS
        baseline = (FULL.method, full) if text else (REUSE.method, reuse)
        if method != baseline[0] and (difference := _against(own, *baseline, name, seed)) is not None:
            against[name] = difference
        if method != REUSE.method and (share := recovery(own, reuse, full, name, seed)) is not None:
            recovered[RECOVERY + name] = share
        if name in margins and (behind := pairs(own, full, name)).questions:
            no_worse[name] = stats.non_inferior(behind.paired(seed).difference, margins[name], METRICS[name].better)
    return replace(row, metrics={**row.metrics, **recovered}, against=against, non_inferior=no_worse)


def _mean(records: Sequence[Record], name: str, seed: int) -> Estimate:
    having = [r for r in records if name in r.metrics]
    return stats.bootstrap([r.metrics[name] for r in having], [r.question for r in having], seed=seed)


def _against(own: Sequence[Record], baseline: str, others: Sequence[Record], name: str, seed: int) -> Against | None:
    both = pairs(own, others, name)
    if not both.questions:
        return None
    found = both.paired(seed)
    return Against(baseline, found.difference, found.p, found.p, noise=True)  # until it is corrected


def recovery(
    own: Sequence[Record], reuse: Sequence[Record], full: Sequence[Record], name: str, seed: int
) -> Estimate | None:
    """Return ``(method − reuse) / (full − reuse)`` of the means with its interval: 1 is as good as full prefill.

    ``None`` where reuse loses nothing but noise, or full prefill is the worse of the two.
    """
    # Pairs of pairs: only questions that all three have.
    wins, losses = pairs(own, reuse, name), pairs(full, reuse, name)
    if not wins.questions or wins.questions != losses.questions:
        return None
    won = [a - b for a, b in zip(wins.left, wins.right, strict=True)]
    lost = [a - b for a, b in zip(losses.left, losses.right, strict=True)]
    if (sum(lost) > 0) != (METRICS[name].better == "higher"):
        return None
    return stats.ratio(won, lost, wins.questions, seed=seed)

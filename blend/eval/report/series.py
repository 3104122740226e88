"""Results put together for one section of the page: what is named how, and which values may share a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blend.eval.metrics.registry import METRICS
from blend.eval.stats import Estimate
from blend.eval.values import Identity, Level, Record, Results, Row
from blend.versions import Environment

HEADLINES = ("f1", "answer_kl", "top1", "first_kl")
"""Metrics that stand open on the page where they were measured; the others are a click away."""


@dataclass(frozen=True)
class Line:
    """One row of some results, and ``series``, the name that it and its other ratios share in plots."""

    series: str
    row: Row

    @property
    def label(self) -> str:
        """The series with the ratio."""
        return name(self.series, self.row.ratio)

    @property
    def where(self) -> str:
        """Condition and level, empty for rows of a plain run."""
        return f"{self.row.condition} {level(self.row.level)}".strip()

    def estimate(self, metric: str) -> Estimate | None:
        """A metric's mean and interval, or ``None`` where it was not measured or is no number."""
        found = self.row.metrics.get(metric)
        return found if found is not None and math.isfinite(found.mean) else None

    def ttft(self, quantile: str) -> float | None:
        """The ``p50`` or ``p95`` of TTFT in ms."""
        return finite(self.row.ttft_ms.get(quantile))


def finite(value: float | None) -> float | None:
    """Return the value, or ``None`` where it is no finite number."""
    return value if value is not None and math.isfinite(value) else None


def name(series: str, ratio: float | None) -> str:
    """Return a series' name with a ratio behind it, if it has one."""
    return series if ratio is None else f"{series} {ratio:g}"


def level(value: Level) -> str:
    """Return a condition's level as text."""
    return "" if value is None else f"{value:g}" if isinstance(value, (int, float)) else value


@dataclass(frozen=True)
class Section:
    """Results of one model, data, prompts and machine: what may be compared."""

    results: tuple[Results, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """All rows. Where two results measured the same, the results' numbers tell their series apart."""
        seen = Counter((r.method, r.ratio, r.condition, r.level) for results in self.results for r in results.rows)
        twice = max(seen.values(), default=0) > 1
        return tuple(
            Line(f"{row.method} ({number})" if twice else row.method, row)
            for number, results in enumerate(self.results, 1)
            for row in results.rows
        )

    @property
    def plain(self) -> tuple[Line, ...]:
        """The rows of no special condition."""
        return tuple(line for line in self.lines if not line.row.condition)

    @property
    def records(self) -> tuple[Record, ...]:
        """All records."""
        return tuple(record for results in self.results for record in results.records)


def sections(results: Sequence[Results]) -> tuple[Section, ...]:
    """Return results in groups whose identity and environment are the same, in the order in which these come up."""
    groups: dict[tuple[Identity, Environment], list[Results]] = {}
    for one in results:
        groups.setdefault((one.identity, one.environment), []).append(one)
    return tuple(Section(tuple(group)) for group in groups.values())


def measured(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return metrics without repetition, in the registry's order: those to show at once, and the others."""
    known = list(METRICS)
    every = sorted({*names}, key=lambda n: (known.index(n) if n in known else len(known), n))
    first = [n for n in HEADLINES if n in every] or every[:2]
    return first, [n for n in every if n not in first]


def by_series(lines: Iterable[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Yield each series' name and rows, these by ratio."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.series, []).append(line)
    for series, group in groups.items():
        yield series, sorted(group, key=lambda line: line.row.ratio or 0.0)

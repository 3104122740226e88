"""Plots of time: what TTFT is made of, and what it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blend.eval.report.drawing import HATCHES, HUES, INK, Look, Plot, legend, plot, short
from blend.eval.report.series import Line, finite, level, name
from blend.eval.values import PerfPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("queue", "lookup", "fetch", "rotate", "select", "recompute")
"""The parts of TTFT in the order in which they begin."""

REST = "rest"
"""What TTFT holds besides its parts: planning, the first token's choice."""

_WHOLE = "first_token"

EXPERIMENTS = {
    "length": ("Prompt length", "tokens of the prompt"),
    "tier": ("Where chunks lie", "tier"),
    "hits": ("Hit rate", "share of the chunks that were stored"),
    "concurrency": ("Concurrency", "requests at once"),
    "stream": ("Stream of questions", "Zipf skew of the stream"),
}
"""Title and axis of each experiment."""


@dataclass(frozen=True)
class Bar:
    """One bar of a breakdown: mean times of the parts, and the median of the whole, in ms."""

    label: str
    timings: Mapping[str, float]
    median: float | None

    def parts(self) -> dict[str, float]:
        """The parts with a time, and the rest."""
        known = [*PARTS, *sorted(self.timings.keys() - {*PARTS, _WHOLE})]
        found = {part: time for part in known if (time := finite(self.timings.get(part))) and time > 0}
        whole = finite(self.timings.get(_WHOLE))
        rest = 0.0 if whole is None else whole - sum(found.values())
        return {**found, REST: rest} if rest > 0 else found


def of_lines(lines: Sequence[Line]) -> list[Bar]:
    """Return a bar a row."""
    return [Bar(line.label, line.row.timings, line.ttft("p50")) for line in lines]


def of_points(points: Sequence[PerfPoint]) -> list[Bar]:
    """Return a bar a point."""
    return [Bar(f"{level(p.x)}: {name(p.method, p.ratio)}", p.timings, finite(p.ttft_p50)) for p in points]


def breakdown(key: str, heading: str, bars: Sequence[Bar]) -> Plot | None:
    """Draw mean TTFT as bars of its parts, and its median as a mark."""
    shown = [(bar, bar.parts()) for bar in bars if bar.parts()]
    if not shown:
        return None
    parts = list(dict.fromkeys([*PARTS, *sorted({part for _, parts in shown for part in parts} - {REST}), REST]))
    parts = [part for part in parts if any(part in found for _, found in shown)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(shown))
        left = [0.0] * len(shown)
        for i, part in enumerate(parts):
            widths = [found.get(part, 0.0) for _, found in shown]
            colour, hatch = HUES[i % len(HUES)], HATCHES[i % len(HATCHES)]
            axes.barh(
                places, widths, 0.7, left, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.6, label=short(part)
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        medians = [(bar.median, place) for place, (bar, _) in enumerate(shown) if bar.median is not None]
        if medians:
            xs, ys = zip(*medians, strict=True)
            axes.plot(xs, ys, "|", color=INK, markersize=15, markeredgewidth=2, label="median")
        axes.set_yticks(places, [short(bar.label) for bar, _ in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel("time to the first token, ms")
        legend(figure, axes, columns=4)

    said = "; ".join(
        f"{bar.label}: " + ", ".join(f"{part} {time:.1f} ms" for part, time in found.items()) for bar, found in shown
    )
    return plot(key, heading, said, draw, height=1.5 + 0.27 * len(shown))


def title(kind: str) -> str:
    """Return what an experiment is called on the page."""
    return EXPERIMENTS.get(kind, (kind, kind))[0]


def experiment(key: str, kind: str, points: Sequence[PerfPoint], look: Mapping[str, Look]) -> Plot | None:
    """Draw TTFT of one experiment, p50 with a whisker up to p95, and throughput below where it was measured."""
    points = [point for point in points if finite(point.ttft_p50) is not None]
    if not points:
        return None
    numeric = all(isinstance(point.x, (int, float)) for point in points)
    places = [level(x) for x in dict.fromkeys(point.x for point in points)]
    groups: dict[tuple[str, float | None], list[PerfPoint]] = {}
    for point in points:
        groups.setdefault((point.method, point.ratio), []).append(point)
    flows = any(finite(point.throughput) is not None for point in points)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2 if flows else 1, sharex=True, squeeze=False)[:, 0]
        for i, ((method, ratio), group) in enumerate(groups.items()):
            if numeric:
                group = sorted(group, key=lambda point: point.x)
                xs = [point.x for point in group]
            else:
                # Named places hold their methods side by side, so that whiskers don't cover each other.
                xs = [places.index(level(p.x)) + 0.6 * ((i + 0.5) / len(groups) - 0.5) for p in group]
            style = look[method]
            marks = {
                "color": style.colour,
                "linestyle": style.dashes if numeric else "none",
                "marker": style.marker,
                "markersize": 7,
                "markeredgecolor": INK,
                "markeredgewidth": 0.7,
            }
            up = [max(0.0, (finite(point.ttft_p95) or 0.0) - point.ttft_p50) for point in group]
            medians = [point.ttft_p50 for point in group]
            panels[0].errorbar(
                xs, medians, yerr=[[0.0] * len(up), up], capsize=3, label=short(name(method, ratio)), **marks
            )
            flowing = [(x, flow) for x, point in zip(xs, group, strict=True) if (flow := finite(point.throughput))]
            if flowing:
                panels[1].plot(*zip(*flowing, strict=True), **marks)
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("TTFT, ms\n(p50, whisker to p95)")
        if flows:
            panels[1].set_ylim(bottom=0)
            panels[1].set_ylabel("requests a second")
        if not numeric:
            panels[-1].set_xticks(range(len(places)), [short(place) for place in places])
        panels[-1].set_xlabel(short(EXPERIMENTS.get(kind, (kind, kind))[1]))
        legend(figure, panels[0])

    said = "; ".join(f"{name(p.method, p.ratio)} at {level(p.x)}: {p.ttft_p50:.0f} ms" for p in points)
    return plot(key, title(kind), f"Median TTFT: {said}", draw, height=5.4 if flows else 3.4)

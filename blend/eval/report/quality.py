"""Plots of what methods keep of full prefill's answers, against what they recompute and how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blend.eval.report.drawing import INK, LINE, Look, Plot, legend, plot, short
from blend.eval.report.series import Line, by_series, finite
from blend.eval.report.text import metric
from blend.eval.stats import Estimate
from blend.page.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def against_charged(key: str, name: str, lines: Sequence[Line], look: Mapping[str, Look]) -> Plot | None:
    """Draw a metric against the charged share: a line a method that selects, a level for full prefill and the like."""
    shown = [line for line in lines if line.estimate(name) is not None]
    # Reuse is where every method's line begins; the others without a ratio are levels to reach.
    flat = [line for line in shown if line.row.ratio is None and line.row.method != "reuse"]
    points = [line for line in shown if line not in flat and finite(line.row.charged) is not None]
    if not points:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for line in flat:
            estimate, style = _known(line, name), look[line.series]
            axes.axhline(
                estimate.mean, color=style.colour, linestyle=style.dashes, linewidth=1.5, label=short(line.label)
            )
            if line.row.method == "full" and estimate.low < estimate.high:
                axes.axhspan(estimate.low, estimate.high, color=LINE, alpha=0.25, linewidth=0)
        for series, group in by_series(points):
            _points(
                axes, [line.row.charged for line in group], [_known(line, name) for line in group], look[series], series
            )
        axes.set_xlabel("charged share of the cached tokens")
        _label(axes, name)
        axes.set_xlim(left=min(-0.01, axes.get_xlim()[0]))
        legend(figure, axes)

    said = "; ".join(f"{line.label} at {number(line.row.charged)}: {_known(line, name)}" for line in points)
    levels = "".join(f"; {line.label}: {_known(line, name)}" for line in flat)
    return plot(key, f"{metric(name).title} against charged ratio", said + levels, draw)


def against_ttft(key: str, name: str, lines: Sequence[Line], look: Mapping[str, Look]) -> Plot | None:
    """Draw a metric against the median TTFT, and ring the points that no other beats in both (the Pareto front)."""
    points = [line for line in lines if line.estimate(name) is not None and line.ttft("p50") is not None]
    if not points:
        return None
    front = pareto(points, name)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        times, means = [_time(line) for line in front], [_known(line, name).mean for line in front]
        axes.step(times, means, where="post", color=INK, linewidth=0.9, alpha=0.7, zorder=1)
        axes.plot(times, means, "o", color="none", markeredgecolor=INK, markersize=13, label="Pareto front")
        for series, group in by_series(points):
            _points(axes, [_time(line) for line in group], [_known(line, name) for line in group], look[series], series)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)  # times of many digits stand apart
        axes.set_xlabel("TTFT, median, ms")
        _label(axes, name)
        legend(figure, axes)

    said = "Pareto front: " + "; ".join(f"{f.label}, {_time(f):.0f} ms, {_known(f, name)}" for f in front)
    return plot(key, f"{metric(name).title} against TTFT", said, draw)


def pareto(lines: Sequence[Line], name: str) -> list[Line]:
    """Return the lines than which none is both no slower and no worse, and better in one of the two; fastest first."""
    sign = 1 if metric(name).better == "higher" else -1
    front: list[Line] = []
    for line in sorted(lines, key=lambda one: (_time(one), -sign * _known(one, name).mean)):
        if not front or sign * _known(line, name).mean > sign * _known(front[-1], name).mean:
            front.append(line)
    return front


def _points(axes: Axes, xs: Sequence[float], estimates: Sequence[Estimate], style: Look, label: str) -> None:
    """Draw means with their intervals, joined where there are several."""
    means = [estimate.mean for estimate in estimates]
    reach = [
        [max(0.0, e.mean - e.low) for e in estimates],
        [max(0.0, e.high - e.mean) for e in estimates],
    ]
    axes.errorbar(
        xs,
        means,
        yerr=reach,
        color=style.colour,
        linestyle=style.dashes,
        linewidth=1.6,
        elinewidth=1.1,
        capsize=3,
        marker=style.marker,
        markersize=7,
        markeredgecolor=INK,
        markeredgewidth=0.7,
        label=short(label),
    )


def _label(axes: Axes, name: str) -> None:
    known = metric(name)
    unit = f", {known.unit}" if known.unit else ""
    axes.set_ylabel(f"{short(known.title)}{unit}\n({known.better} is better)")


def _known(line: Line, name: str) -> Estimate:
    estimate = line.estimate(name)
    assert estimate is not None, "only lines with the metric get here"
    return estimate


def _time(line: Line) -> float:
    time = line.ttft("p50")
    assert time is not None, "only lines with a TTFT get here"
    return time

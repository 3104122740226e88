"""Draws a sweep. The one module of the benchmarks that needs matplotlib, and imports it only to draw."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from growth import Cell, Fit, over_rows, over_tokens

MARKERS = "osD^vPX*hp"
STYLES = ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))


def need_matplotlib() -> None:
    """Stop with what to do about it where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("drawing needs matplotlib: pip install -c constraints.txt '.[eval]'")


def plot(cells: Sequence[Cell], fitted: Fit, path: Path, subtitle: str) -> None:
    """Draw seconds over tokens, a line a ratio, and over fresh rows, a line a length, with the fit; write a PNG.

    Lines differ in marker and dashes, so that they can be told apart without colour.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), dpi=130, layout="constrained")
    figure.suptitle(f"Time of prefill, chunks in the host tier\n{subtitle}", fontsize=12)
    left, right = figure.subplots(1, 2, sharey=True)
    predicted = {(cell.tokens, cell.ratio): seconds for cell, seconds in zip(cells, fitted.predicted, strict=True)}
    powers = {r: f"ratio {r:g}   (tokens$^{{{e:.2f}}}$)" for r, e in over_tokens(cells).items()}
    _lines(left, cells, predicted, lambda c: c.ratio, lambda c: float(c.tokens), powers, "viridis")
    left.set(xlabel="prompt (tokens)", ylabel="time to first token (seconds)", title="over tokens, at each ratio")
    powers = {float(n): f"{n:,} tokens   (rows$^{{{e:.2f}}}$)" for n, e in over_rows(cells).items()}
    _lines(right, cells, predicted, lambda c: float(c.tokens), lambda c: c.rows, powers, "plasma")
    right.set(xlabel="fresh rows (count, the probe's included)", title="over fresh rows, at each length")
    right.tick_params(labelleft=True)
    _plain_ticks(left.xaxis, sorted({cell.tokens for cell in cells}))
    _plain_ticks(right.xaxis, None)
    _plain_ticks(left.yaxis, None)
    milliseconds = {name: seconds * 1e3 for name, seconds in fitted.coefficients.items()}
    figure.supxlabel(
        f"fitted: milliseconds = {milliseconds['row']:.3g} · rows + {milliseconds['row_token']:.3g} · rows · "
        f"tokens + {milliseconds['byte'] * 1e6:.3g} · MB loaded + {milliseconds['request']:.3g};   R² {fitted.r2:.4f}, "
        f"largest residual {fitted.worst:.0%}",
        fontsize=9.5,
    )
    figure.savefig(path)


def _lines(
    axes: Any,
    cells: Sequence[Cell],
    predicted: dict[tuple[int, float], float],
    group: Callable[[Cell], float],
    across: Callable[[Cell], float],
    names: Mapping[float, str],
    colours: str,
) -> None:
    """A line for each group of cells, and its name in the legend, which has the highest line first."""
    from matplotlib import colormaps

    groups = sorted({group(cell) for cell in cells})
    for number, which in reversed(list(enumerate(groups))):
        points = sorted((cell for cell in cells if group(cell) == which), key=across)
        x = [across(cell) for cell in points]
        colour = colormaps[colours](0.7 * number / max(1, len(groups) - 1))
        axes.loglog(
            x,
            [cell.seconds for cell in points],
            color=colour,
            linestyle=STYLES[number % len(STYLES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=6,
            linewidth=1.7,
            label=names[which],
        )
        fitted = [predicted[cell.tokens, cell.ratio] for cell in points]
        axes.loglog(x, fitted, "x", color="black", markersize=6, label="" if number else "fitted")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=9.5, handlelength=4.5, framealpha=0.95)


def _plain_ticks(axis: Any, at: Sequence[float] | None) -> None:
    """Plain numbers at 1, 2 and 5 of each decade, or at these values, and no minor labels."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if at is None else FixedLocator(at))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())

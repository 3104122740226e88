"""Box plots of answers under changed conditions: other orders, places, sizes and numbers of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median, pstdev
from typing import TYPE_CHECKING, TypeAlias

from blend.eval.report.drawing import INK, PAPER, Look, Plot, plot, short
from blend.eval.report.series import finite, level, name
from blend.eval.report.text import metric
from blend.eval.values import Level, Record
from blend.page.text import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Boxes: TypeAlias = dict[str, dict[tuple[str, float | None], list[float]]]
"""Values by level, and there by method with ratio."""


def conditions(records: Iterable[Record]) -> list[str]:
    """Return the conditions that records were made under, in the order in which they come up."""
    return list(dict.fromkeys(record.condition for record in records if record.condition))


def by_level(
    key: str, condition: str, measure: str, records: Iterable[Record], look: Mapping[str, Look]
) -> Plot | None:
    """Draw a metric's values over questions and orders: a box a method and level of one condition."""
    boxes: Boxes = {}
    for record in sorted(records, key=lambda one: _rank(one.level)):
        value = finite(record.metrics.get(measure))
        if record.condition == condition and value is not None:
            boxes.setdefault(level(record.level), {}).setdefault((record.method, record.ratio), []).append(value)
    return _draw(key, f"{metric(measure).title} by {condition}", _axis(measure), boxes, look)


def between_orders(key: str, measure: str, records: Iterable[Record], look: Mapping[str, Look]) -> Plot | None:
    """Draw how far a question's metric moves between orders of the same passages: a box of standard deviations.

    Full prefill's moves too: its box is what the others are to be measured by.
    """
    orders: dict[tuple[str, float | None], dict[str, list[float]]] = {}
    for record in records:
        value = finite(record.metrics.get(measure))
        if record.condition == "order" and value is not None:
            orders.setdefault((record.method, record.ratio), {}).setdefault(record.question, []).append(value)
    moved = {
        method: [pstdev(values) for values in questions.values() if len(values) > 1]
        for method, questions in orders.items()
    }
    title = f"{metric(measure).title}: how far orders move it"
    axis = f"{short(metric(measure).title)}, standard deviation\nof one question's values over orders"
    return _draw(key, title, axis, {"": {method: values for method, values in moved.items() if values}}, look)


def _draw(key: str, title: str, axis: str, boxes: Boxes, look: Mapping[str, Look]) -> Plot | None:
    # From the top: each level's methods, and a gap.
    rows: list[tuple[float, str, str, list[float]]] = []
    place = 0.0
    for where, methods in boxes.items():
        for (method, ratio), values in methods.items():
            rows.append((place, ": ".join(filter(None, (where, name(method, ratio)))), method, values))
            place += 1
        place += 0.6
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, _, method, values in rows:
            style = look[method]
            # The median and the mean are drawn in ink: on a box of ink they could not be seen.
            face = PAPER if style.colour == INK else style.colour
            axes.boxplot(
                [values],
                positions=[place],
                orientation="horizontal",
                widths=0.66,
                patch_artist=True,
                manage_ticks=False,
                showmeans=True,
                boxprops={"facecolor": face, "edgecolor": INK, "hatch": style.hatch, "alpha": 0.9},
                medianprops={"color": INK, "linewidth": 2.2},
                meanprops={"marker": "D", "markerfacecolor": INK, "markeredgecolor": INK, "markersize": 4},
                flierprops={"marker": "o", "markersize": 3.5, "markeredgecolor": INK},
                whiskerprops={"color": INK},
                capprops={"color": INK},
            )
        axes.set_yticks([place for place, *_ in rows], [short(label) for _, label, *_ in rows])
        axes.set_ylim(rows[-1][0] + 0.7, -0.7)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis)

    said = "; ".join(
        f"{label}: median {number(median(values))} of {len(values)}, {number(min(values))} to {number(max(values))}"
        for _, label, _, values in rows
    )
    return plot(key, title, said, draw, height=0.9 + 0.27 * place)


def _axis(measure: str) -> str:
    known = metric(measure)
    return f"{short(known.title)}{', ' + known.unit if known.unit else ''} ({known.better} is better)"


def _rank(value: Level) -> tuple[bool, float]:
    """Sort numbers by size; texts stay in the order in which they come up, behind them."""
    return (False, value) if isinstance(value, (int, float)) else (True, 0.0)

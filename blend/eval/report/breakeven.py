"""Where blending begins to pay: the streams that ``blend-eval perf`` plays over what it measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blend.eval.report.drawing import INK, Look, Plot, legend, plot, short
from blend.eval.report.series import finite, name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Stream = Mapping[str, Any]
"""One stream as ``results.json`` has it: its skew, mean times in ms, and after how many requests chunks have paid."""

_TIMES = ("full", "prefix", "blended")
_NEEDED = ("skew", *(f"{time}_ms" for time in _TIMES))


def streams(found: Mapping[str, object]) -> Iterator[tuple[str, str, list[Stream]]]:
    """Yield each plan's label, its method, and its streams by skew; streams without all times are left out."""
    for plan in _dicts(found.get("methods")):
        played = [one for one in _dicts(plan.get("streams")) if all(_is_number(one.get(key)) for key in _NEEDED)]
        if played:
            method = str(plan.get("method"))
            yield name(method, plan.get("ratio")), method, sorted(played, key=lambda one: float(one["skew"]))


def break_even(key: str, label: str, method: str, played: Sequence[Stream], look: Mapping[str, Look]) -> Plot:
    """Draw the mean TTFT of full prefill, an ideal exact prefix cache and one plan against the streams' skew."""
    skews = [float(one["skew"]) for one in played]
    rows = [("full", "full"), ("prefix", "prefix"), ("blended", method)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for time, who in rows:
            style = look[who]
            axes.plot(
                skews,
                [float(one[f"{time}_ms"]) for one in played],
                color=style.colour,
                linestyle=style.dashes,
                marker=style.marker,
                markersize=7,
                markeredgecolor=INK,
                markeredgewidth=0.7,
                label=short(label) if time == "blended" else who,
            )
        axes.set_ylim(bottom=0)
        axes.set_ylabel("mean TTFT, ms")
        axes.set_xlabel("Zipf skew of the stream")
        legend(figure, axes)

    said = "; ".join(
        f"skew {skew:g}: " + ", ".join(f"{time} {float(one[f'{time}_ms']):.0f} ms" for time in _TIMES)
        for skew, one in zip(skews, played, strict=True)
    )
    return plot(key, f"Break-even of {label}", said, draw)


def _dicts(value: object) -> list[Stream]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, (list, tuple)) else []


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and finite(value) is not None

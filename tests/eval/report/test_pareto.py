"""The Pareto front of quality and TTFT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blend.eval.report.quality import pareto
from blend.eval.report.series import Line
from tests.eval.report import documents


def line(name: str, time: float, mean: float, metric: str) -> Line:
    row = replace(documents.row("query"), ttft_ms={"p50": time}, metrics={metric: documents.estimate(mean)})
    return Line(name, row)


@pytest.mark.parametrize(
    ("metric", "front"),
    [
        ("f1", ["fast", "middle", "good"]),
        ("answer_kl", ["fast", "low"]),
    ],
)
def test_the_front_holds_what_no_other_beats_in_both(metric: str, front: list[str]) -> None:
    points = [("good", 300, 0.9), ("fast", 100, 0.5), ("middle", 200, 0.7), ("low", 250, 0.4), ("equal", 200, 0.7)]
    lines = [line(name, time, mean, metric) for name, time, mean in points]
    assert [found.series for found in pareto(lines, metric)] == front

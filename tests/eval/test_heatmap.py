"""The heatmap of one prompt: a state and a score for each token, as the method itself chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend import Plan
from blend.eval.heatmap import heatmap, subject
from blend.eval.plan import Planned, plan
from tests import tiny


@pytest.mark.parametrize("method", ["query", "head", "deviation"])
def test_every_token_has_the_state_that_the_method_gives_it(method: str, tmp_path: Path) -> None:
    prompt = tiny.prompt()
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        found = heatmap(engine, "q", prompt, Planned(method, 0.4), namespace="default")
        report = engine.prefill(prompt, Plan(method, 0.4), positions=True).report
    assert len(found.tokens) == len(found.state) == len(found.scores) == len(prompt)
    chosen = {i for i, state in enumerate(found.state) if state == "chosen"}
    assert len(chosen) == report.selected and chosen <= set(report.recomputed_positions or ())
    inside = {i for start, end in found.chunks for i in range(start, end)}
    assert {i for i, state in enumerate(found.state) if state == "mandatory"} == set(range(len(prompt))) - inside
    scored = {i: score for i, score in enumerate(found.scores) if score is not None}
    assert chosen <= set(scored) <= inside
    ahead = {start + at for start, _ in found.chunks for at in range(8)} if method == "query" else set()
    lowest = min(scored[i] for i in chosen - ahead)
    assert all(score <= lowest for i, score in scored.items() if i not in chosen)
    assert len(found.chunks) == 3


def test_query_is_shown_where_it_is_planned() -> None:
    assert subject(plan(["reuse", "head", "query"], [0.1, 0.2])) == Planned("query", 0.1)
    assert subject(plan(["reuse", "deviation-released", "head"], [0.1])) == Planned("head", 0.1)
    assert subject(plan(["reuse", "closed-book"], [0.1])) is None

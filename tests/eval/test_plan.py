"""Plans of evaluation: full prefill first, one of each, and unknown names with the nearest."""

from __future__ import annotations

import pytest

from blend.errors import InvalidInput
from blend.eval.plan import FULL, Planned, conditioned, plan


def test_full_prefill_comes_first_and_only_methods_that_select_have_ratios() -> None:
    found = plan(["reuse", "full", "query", "closed-book", "auto"], [0.0, 0.15])
    assert found == (
        FULL,
        Planned("reuse"),
        Planned("query", 0.0),
        Planned("query", 0.15),
        Planned("closed-book"),
        Planned("auto"),
    )
    assert [str(p) for p in found[:4]] == ["full", "reuse", "query 0", "query 0.15"]


def test_methods_over_conditioned_chunks_are_planned_like_the_others() -> None:
    found = plan(["reuse@conditioned", "query@conditioned"], [0.1])
    assert found == (FULL, Planned("reuse@conditioned"), Planned("query@conditioned", 0.1))
    assert conditioned(found) and conditioned(plan(["auto"], [0.1])) and not conditioned(plan(["query"], [0.1]))
    for name in ("full@conditioned", "auto@conditioned", "oracle@conditioned"):
        with pytest.raises(InvalidInput, match="methods"):
            plan([name], [0.1])


def test_wrong_names_and_ratios_are_refused() -> None:
    with pytest.raises(InvalidInput, match="query .the nearest"):
        plan(["quarry"], [0.1])
    with pytest.raises(InvalidInput, match="ratios"):
        plan(["query"], [1.5])

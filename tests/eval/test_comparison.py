"""Two results, paired by question; those that say nothing about each other are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blend.errors import InvalidInput
from blend.eval.comparison import check, compare, name_of, only_in
from blend.eval.values import Results
from tests.eval import samples

BEFORE = {("full", None): [1.0] * 8, ("query", 0.15): [0.55, 0.65] * 3 + [0.5, 0.7], ("query", 0.3): [0.9] * 8}
AFTER = {("full", None): [1.0] * 8, ("query", 0.15): [0.6, 0.7] * 3 + [0.6, 0.8], ("head", 0.15): [0.2] * 8}


def document(values: dict[tuple[str, float | None], list[float]], **identity: str) -> Results:
    return samples.document(samples.records(values), **identity)


def test_rows_of_both_are_paired_by_question() -> None:
    found = compare(document(BEFORE), document(AFTER))
    assert [row.name for row in found] == ["full", "query 0.15"]
    same, query = (row.differences["f1"] for row in found)
    assert same.difference.mean == 0 and same.noise and same.p == 1
    assert query.difference.mean == pytest.approx(0.0625) and query.baseline == "A" and not query.noise
    assert query.p == pytest.approx(2 / 2**8) and query.p_holm == pytest.approx(2 * query.p)


def test_a_difference_that_many_tests_could_bring_is_noise() -> None:
    """Six questions that all say the same give p = 2 / 2⁶; corrected for four tests, that is above 0.05."""
    before = {("head", ratio): [0.5] * 6 for ratio in (0.1, 0.2, 0.3, 0.4)}
    after = {key: [0.6] * 6 for key in before}
    alone = compare(document(before), document(after), ratios=[0.1])[0].differences["f1"]
    among = compare(document(before), document(after))[0].differences["f1"]
    assert alone.p == alone.p_holm == pytest.approx(2 / 2**6) and not alone.noise
    assert among.p_holm == pytest.approx(4 * alone.p) and among.noise


def test_only_what_is_asked_for_is_compared() -> None:
    a, b = document(BEFORE), document({**BEFORE, **AFTER})
    assert [row.name for row in compare(a, b, methods=["query"])] == ["query 0.15", "query 0.3"]
    assert [row.name for row in compare(a, b, methods=["query"], ratios=[0.3])] == ["query 0.3"]
    with pytest.raises(InvalidInput, match="query .the nearest"):
        compare(a, b, methods=["quary"])
    for ratios in ([0.7], [0.15, 0.7]):
        with pytest.raises(InvalidInput, match="0.7; allowed: 0.15, 0.3|nothing that both have"):
            compare(a, b, methods=["query"], ratios=ratios)
    with pytest.raises(InvalidInput, match="ratios of both: got 0.7"):
        compare(a, b, ratios=[0.7])


def test_rows_that_one_has_alone_are_named() -> None:
    a, b = document(BEFORE), document(AFTER)
    assert [name_of(row) for row in only_in(a, b)] == ["query 0.3"]
    assert [name_of(row) for row in only_in(b, a)] == ["head 0.15"]
    assert only_in(a, b, methods=["query"], ratios=[0.15]) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("model", "models"), ("dtype", "dtypes"), ("prompts", "prompts"), ("dataset", "data")],
)
def test_results_of_something_else_are_refused_with_what_differs(name: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=f"different {said}"):
        compare(document(BEFORE), document(AFTER, **{name: "other"}))


def test_answers_of_other_lengths_and_results_without_answers_are_refused() -> None:
    a, b = document(BEFORE), document(AFTER)
    with pytest.raises(InvalidInput, match=r"max_new_tokens \(4 and 5\)"):
        check(a, replace(b, settings={**b.settings, "max_new_tokens": 5}))
    with pytest.raises(InvalidInput, match="kind perf"):
        check(a, replace(b, kind="perf", records=(), rows=()))


def test_a_model_may_have_moved() -> None:
    check(document(BEFORE), document(AFTER, name="elsewhere"))

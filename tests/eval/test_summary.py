"""Rows from records: values by hand, what each is held against, and what few questions do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blend.eval.summary import pairs, recovery, summarize
from blend.eval.values import Record, Row
from tests.eval import samples

ONE = {
    ("full", None): [1.0] * 8,
    ("reuse", None): [0.0, 0.2] * 4,
    ("query", 0.15): [1.0, 0.6] * 4,
    ("query", 0.3): [1.0, 1.0] * 4,
}


def rows(records: list[Record], **margins: float) -> dict[tuple[str, float | None], Row]:
    return {(r.method, r.ratio): r for r in summarize(records, margins=margins, seed=0)}


def test_rows_stand_in_the_order_of_their_records_with_means_by_hand() -> None:
    found = rows(samples.records(ONE))
    assert list(found) == list(ONE)
    query = found["query", 0.15]
    assert query.questions == 8 and query.metrics["f1"].mean == pytest.approx(0.8) and query.metrics["f1"].count == 8
    assert query.charged == pytest.approx(0.2) and query.ttft_ms == {"p50": 8.0, "p95": 8.0}
    assert query.timings["first_token"] == 8.0 and set(query.timings) >= {"fetch", "recompute"}


def test_recovery_is_the_share_of_reuses_loss_that_is_won_back() -> None:
    found = rows(samples.records(ONE))
    assert found["query", 0.15].metrics["recovery_f1"].mean == pytest.approx((0.8 - 0.1) / (1.0 - 0.1))
    assert found["query", 0.3].metrics["recovery_f1"].mean == pytest.approx(1.0)
    assert "recovery_f1" not in found["full", None].metrics and "recovery_f1" not in found["reuse", None].metrics


def test_recovery_of_a_kl_counts_down_to_zero() -> None:
    kl = {("full", None): [0.0] * 8, ("reuse", None): [1.0, 3.0] * 4, ("head", 0.1): [1.0, 0.0] * 4}
    found = rows(samples.records(kl, "answer_kl"))
    share = found["head", 0.1].metrics["recovery_answer_kl"]
    assert share.mean == pytest.approx(1 - 0.5 / 2.0) and share.low <= share.mean <= share.high


@pytest.mark.parametrize(
    ("reuse", "full"),
    [([0.0, 0.2] * 2, [1.0] * 4), ([1.0, 0.0] * 4, [0.0, 1.0] * 4), ([1.0] * 8, [0.0] * 8), ([1.0] * 8, [1.0] * 8)],
    ids=["few questions", "a loss inside the noise", "reuse is better", "no loss"],
)
def test_there_is_no_recovery_where_reuse_loses_nothing(reuse: list[float], full: list[float]) -> None:
    made = {("full", None): full, ("reuse", None): reuse, ("head", 0.1): [0.5] * len(full)}
    found = rows(samples.records(made))
    assert "recovery_f1" not in found["head", 0.1].metrics


@pytest.mark.parametrize(
    ("metric", "method", "reuse", "full", "expected"),
    [
        ("f1", 0.8, 0.4, 0.8, 1.0),
        ("f1", 0.3, 0.4, 0.8, -0.25),  # worse than reuse
        ("f1", 0.9, 0.4, 0.8, 1.25),  # better than full prefill
        ("first_kl", 0.05, 0.2, 0.0, 0.75),  # a quarter is left
        ("first_kl", 0.4, 0.2, 0.0, -1.0),
    ],
)
def test_recovery_by_hand(metric: str, method: float, reuse: float, full: float, expected: float) -> None:
    own, plain, exact = (samples.records({("head", 0.1): [value] * 8}, metric) for value in (method, reuse, full))
    found = recovery(own, plain, exact, metric, 0)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((expected,) * 3)


def test_recovery_needs_the_same_questions_of_all_three() -> None:
    by = {key: samples.records({key: values}) for key, values in ONE.items()}
    own, reuse, full = by["query", 0.15], by["reuse", None], by["full", None]
    assert recovery(own, reuse, full, "f1", 0) is not None
    assert recovery(own, reuse, full[:6], "f1", 0) is None
    assert recovery(own, [], full, "f1", 0) is None


def test_answers_are_held_against_full_prefill_and_distances_against_reuse() -> None:
    made = samples.records(ONE)
    kl = {("full", None): 0.0, ("reuse", None): 0.5, ("query", 0.15): 0.1, ("query", 0.3): 0.0}
    made = [replace(r, metrics={**r.metrics, "first_kl": kl[r.method, r.ratio]}) for r in made]
    found = rows(made, f1=0.3, first_kl=0.05)
    query = found["query", 0.15]
    assert query.against["f1"].baseline == "full" and query.against["f1"].difference.mean == pytest.approx(-0.2)
    assert query.against["first_kl"].baseline == "reuse" and query.against["first_kl"].difference.mean == pytest.approx(
        -0.4
    )
    assert set(found["reuse", None].against) == {"f1"} and not found["full", None].against
    assert query.against["first_kl"].p == pytest.approx(2 / 2**8) and not query.against["first_kl"].noise
    assert query.against["first_kl"].p_holm == pytest.approx(5 * 2 / 2**8), "five tests in this table, ties among them"
    assert query.non_inferior == {"f1": False, "first_kl": False}
    assert found["query", 0.3].non_inferior == {"f1": True, "first_kl": True}


def test_few_questions_show_nothing() -> None:
    made = {key: values[:3] for key, values in ONE.items()}
    found = rows(samples.records(made), f1=1.0)
    assert found["reuse", None].against["f1"].noise
    assert found["query", 0.3].non_inferior == {"f1": False}


def test_conditions_and_levels_have_rows_and_baselines_of_their_own() -> None:
    made = [
        replace(r, condition="evidence", level=level, metrics={"f1": r.metrics["f1"] * share})
        for level, share in (("first", 1.0), ("last", 0.5))
        for r in samples.records(ONE)
    ]
    found = summarize(made, margins={}, seed=0)
    assert [(r.condition, r.level) for r in found[:1] + found[-1:]] == [("evidence", "first"), ("evidence", "last")]
    last = next(r for r in found if (r.level, r.method) == ("last", "reuse"))
    assert last.against["f1"].difference.mean == pytest.approx(-0.45)


def test_orders_are_paired_with_themselves_and_count_as_one_question() -> None:
    left = [replace(samples.record("q0", "head", f1=float(i)), order=i) for i in range(3)]
    right = [replace(samples.record("q0", "full", f1=float(i)), order=i) for i in (2, 0)]
    both = pairs(left, right, "f1")
    assert (both.left, both.right, both.questions) == ((0.0, 2.0), (0.0, 2.0), ("q0", "q0"))
    assert both.paired(0).difference.count == 1

"""Gates: read strictly, judged by means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blend.errors import InvalidInput
from blend.eval.comparison import Compared, compare
from blend.eval.gates import Gate, judge, parse
from tests.eval import samples


@pytest.fixture
def rows() -> tuple[Compared, ...]:
    before = samples.records({("query", 0.15): [0.5] * 8})
    after = samples.records({("query", 0.15): [0.4] * 8})
    made = []
    for records, kl, ttft in ((before, 0.01, 100.0), (after, 0.03, 90.0)):
        changed = [replace(r, metrics={**r.metrics, "first_kl": kl}, ttft_ms=ttft) for r in records]
        made.append(samples.document(changed))
    return compare(*made)


def test_conditions_are_read_with_and_without_spaces() -> None:
    assert parse("kl<=0.03,f1_drop<=0.02") == (Gate("kl", "<=", 0.03), Gate("f1_drop", "<=", 0.02))
    assert parse(" top1 > .9 , ttft_p50_rise < -1e1") == (Gate("top1", ">", 0.9), Gate("ttft_p50_rise", "<", -10.0))
    assert str(parse("kl<=0.030")[0]) == "kl<=0.03"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "NAME<=NUMBER"),
        ("kl", "NAME<=NUMBER"),
        ("kl=0.03", "NAME<=NUMBER"),
        ("kl<=0.03,", "NAME<=NUMBER"),
        ("kl<=0.03 f1>=1", "NAME<=NUMBER"),
        ("k1<=0.03", "kl .the nearest"),
        ("f1_dropp<=0.03", "f1_drop .the nearest"),
        ("kl<=nan", "a finite number"),
        ("kl<=1e999", "a finite number"),
        ("kl<=x", "a finite number"),
        ("kl<==0.1", "a finite number"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        parse(text)


@pytest.mark.parametrize(
    ("text", "value", "passed"),
    [
        ("kl<=0.03", 0.03, True),
        ("kl<0.03", 0.03, False),
        ("first_kl_rise<=0.01", 0.02, False),
        ("f1_drop<=0.02", 0.1, False),
        ("f1_drop<=0.2", 0.1, True),
        ("f1>=0.4", 0.4, True),
        ("ttft_p95<=95", 90.0, True),
        ("ttft_p50_rise<=0", -10.0, True),
        ("charged<=0.15", 0.2, False),
    ],
)
def test_gates_are_judged_by_means(rows: tuple[Compared, ...], text: str, value: float, passed: bool) -> None:
    (verdict,) = judge(parse(text), rows)
    assert verdict.value == pytest.approx(value) and verdict.passed is passed and verdict.row == "query 0.15"


def test_a_metric_that_was_not_measured_is_named(rows: tuple[Compared, ...]) -> None:
    with pytest.raises(InvalidInput, match="no top1 of query 0.15"):
        judge(parse("top1>=0.9"), rows)

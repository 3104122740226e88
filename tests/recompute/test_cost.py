"""What passes cost: the work of rows, its price, and what an odd measurement does to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidConfig
from blend.recompute.cost import RECENT, PassCost, Running, Work


def test_a_row_reads_the_keys_to_its_left_and_its_own() -> None:
    assert Work.at([0, 4, 9]) == Work(3, 1 + 5 + 10)
    assert Work.full(50) == Work.at(range(50))
    assert Work.at([]) == Work()


@given(st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_work_adds_up_and_is_never_negative(a: set[int], b: set[int]) -> None:
    both = Work.at(a).plus(Work.at(b))
    assert both.less(Work.at(a)) == Work.at(b)
    assert min(Work.at(a).less(both)) == 0


def test_a_price_has_a_part_for_the_pass_its_rows_and_its_keys() -> None:
    assert PassCost(2.0, 0.5, 0.001).of(Work(10, 3000)) == 2 + 5 + 3
    for wrong in (-1.0, math.nan, math.inf, "1", True):
        with pytest.raises(InvalidConfig, match="per_key"):
            PassCost(1.0, 1.0, wrong)  # type: ignore[arg-type]


def test_one_odd_ratio_moves_nothing() -> None:
    trusted = Running(trusted=2)
    trusted.saw(1000.0, 1.0)
    assert trusted.value == 1.0
    for _ in range(RECENT):
        trusted.saw(3.0, 2.0)
    trusted.saw(1000.0, 1.0)
    trusted.saw(0.001, 1.0)
    assert trusted.value == 1.5 and trusted.least == 0.001


def test_it_follows_a_machine_that_has_become_slower() -> None:
    running = Running(trusted=2)
    for _ in range(RECENT):
        running.saw(1.0, 1.0)
    for _ in range(RECENT // 2 + 1):
        running.saw(4.0, 1.0)
    assert running.value == 4.0


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40), st.integers(0, 2))
def test_it_is_a_number_above_0_once_anything_was_seen(measured: list[float], trusted: int) -> None:
    running = Running(trusted)
    for one in measured:
        running.saw(one, 1.0)
    known = trusted or any(0 < one < math.inf for one in measured)
    assert (running.value > 0) == bool(known) and math.isfinite(running.value)
    assert running.least <= running.value


def test_what_is_no_time_is_not_counted() -> None:
    running = Running(trusted=0)
    assert running.value == 0.0
    for measured, predicted in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)):
        running.saw(measured, predicted)
    assert running.value == running.least == 0.0

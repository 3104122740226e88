"""The budget: what may be selected and what is charged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.recompute.budget import Budget

ratios = st.floats(0, 1)


@given(st.integers(1, 80), st.integers(1, 5000), ratios, st.integers(0, 5000))
def test_rows_never_exceed_ratio_cap_or_cached(layers: int, cached: int, ratio: float, probe_rows: int) -> None:
    probe = probe_rows * layers
    for cap in (None, 0.0, 0.1, ratio, 1.0):
        budget = Budget(layers, cached, ratio, cap)
        rows = budget.rows(probe)
        assert 0 <= rows <= cached
        assert rows <= ratio * cached + 1
        if cap is not None and rows:
            assert budget.charged(probe, rows) <= cap + 1e-6


def test_rows_round_up_and_survive_floating_point() -> None:
    assert Budget(4, 100, 0.15).rows(0) == 15
    assert Budget(4, 7, 0.15).rows(0) == 2
    assert Budget(4, 1, 0.01).rows(0) == 1
    assert Budget(4, 100, 0.0).rows(0) == 0
    assert Budget(4, 100, 1.0).rows(0) == 100


def test_a_probe_is_taken_off_the_cap_and_not_off_the_ratio() -> None:
    assert Budget(10, 100, 0.15).rows(probe=50) == 15
    assert Budget(10, 100, 0.15, 0.15).rows(probe=50) == 10
    assert Budget(10, 100, 0.15, 0.15).rows(probe=200) == 0


def test_charges() -> None:
    assert Budget(30, 1000, 0.16).charged(probe=2 * 1000, selected=160) == pytest.approx(0.16 + 2 / 30)
    assert Budget(30, 0, 0.15).charged(probe=0, selected=0) == 0.0

"""Curves through measured times."""

from __future__ import annotations

import pytest

from blend.errors import InvalidInput
from blend.eval.curves import fit, fit_passes
from blend.recompute.cost import PassCost, Work


def test_a_curve_finds_the_terms_that_made_the_times() -> None:
    sizes = [128, 512, 1024, 4096]
    curve = fit(sizes, [3 + 0.2 * n + 1e-5 * n * n for n in sizes])
    assert (curve.base, curve.linear, curve.square) == pytest.approx((3, 0.2, 1e-5), rel=1e-6)
    assert (curve.fewest, curve.most) == (128, 4096)
    assert curve.ms(2048) == pytest.approx(3 + 0.2 * 2048 + 1e-5 * 2048**2)


def test_a_curve_never_falls_even_where_the_times_do() -> None:
    curve = fit([100, 200, 300], [9.0, 6.0, 3.0])
    assert min(curve.base, curve.linear, curve.square) >= 0
    assert curve.ms(100) <= curve.ms(300)


def test_bytes_in_their_billions_are_fitted_as_well() -> None:
    sizes = [10**8, 10**9, 4 * 10**9]
    curve = fit(sizes, [1.5 + n / 1e6 for n in sizes], square=False)
    assert curve.square == 0
    assert (curve.base, curve.linear) == pytest.approx((1.5, 1e-6), rel=1e-6)


def test_of_one_size_the_time_is_in_proportion() -> None:
    curve = fit([200, 200], [40.0, 40.0])
    assert (curve.base, curve.square) == (0, 0) and curve.ms(400) == pytest.approx(80)


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([1], []), ([0], [1.0]), ([1], [0.0])])
def test_what_is_no_measurement_is_refused(sizes: list[int], times: list[float]) -> None:
    with pytest.raises(InvalidInput):
        fit(sizes, times)


FULL = [Work.full(n) for n in (256, 512, 2048)]
SCATTERED = [Work(60 + share * n, (60 + share * n) * n / 2) for n in (256, 512, 2048) for share in (0.0, 0.05, 0.4)]


def test_passes_give_back_the_prices_that_made_their_times() -> None:
    cost = PassCost(base=3.0, per_row=0.2, per_key=1e-5, fewest=60, most=2048)
    found = fit_passes([(work, cost.of(work)) for work in (*FULL, *SCATTERED)])
    assert (found.base, found.per_row, found.per_key) == pytest.approx((3.0, 0.2, 1e-5), rel=1e-6)
    assert (found.fewest, found.most) == (60, 2048)


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_no_price_is_negative_and_measured_passes_are_met(count: int) -> None:
    passes = [(work, 5.0 + (number % 3) * 0.1) for number, work in enumerate([*FULL, *SCATTERED][:count])]
    found = fit_passes(passes)
    assert min(found.base, found.per_row, found.per_key) >= 0
    assert found.of(passes[0][0]) == pytest.approx(5.0, rel=0.9)


def test_of_one_pass_the_price_is_in_proportion_to_its_rows() -> None:
    found = fit_passes([(Work.full(100), 50.0)])
    assert found == PassCost(0.0, 0.5, 0.0, 100, 100)


@pytest.mark.parametrize("passes", [[], [(Work(), 1.0)], [(Work(3, 9), 0.0)]])
def test_what_is_no_pass_is_refused(passes: list[tuple[Work, float]]) -> None:
    with pytest.raises(InvalidInput, match="passes"):
        fit_passes(passes)

"""Curves through measured times."""

from __future__ import annotations

import pytest

from blend.errors import InvalidInput
from blend.eval.curves import fit


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

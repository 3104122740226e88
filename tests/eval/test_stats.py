"""Intervals, paired tests and corrections: against values worked out by hand, against scipy, and by what must hold."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from blend.errors import InvalidInput
from blend.eval.stats import Estimate, bootstrap, holm, noise, non_inferior, paired, ratio

numbers = st.floats(-1e6, 1e6)
samples = st.lists(numbers, min_size=1, max_size=25)
shares = st.lists(st.floats(0, 1), max_size=25)


def close(left: Estimate, right: Estimate) -> bool:
    pairs = zip((left.mean, left.low, left.high), (right.mean, right.low, right.high), strict=True)
    return all(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-6) for x, y in pairs) and left.count == right.count


@given(samples)
def test_an_interval_holds_the_mean_and_lies_within_the_values(values: list[float]) -> None:
    found = bootstrap(values, samples=200)
    assert found.low <= found.mean <= found.high
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6) and found.count == len(values)
    assert min(values) - 1e-6 <= found.low and found.high <= max(values) + 1e-6


@given(samples, st.integers(2, 5))
def test_copies_of_a_question_are_no_further_questions(values: list[float], copies: int) -> None:
    """k identical values a cluster say what one says: the interval does not shrink."""
    clusters = [i for i in range(len(values)) for _ in range(copies)]
    repeated = [v for v in values for _ in range(copies)]
    assert close(bootstrap(repeated, clusters, samples=200), bootstrap(values, samples=200))


def test_without_clusters_copies_would_make_the_interval_narrower() -> None:
    values = [0.0, 1.0, 2.0, 3.0, 10.0]
    clustered = bootstrap(values * 8, list("abcde") * 8)
    blind = bootstrap(values * 8)
    assert clustered.count == 5 and blind.count == 40
    assert clustered.high - clustered.low > 2 * (blind.high - blind.low)


def test_clusters_of_different_sizes_weigh_by_their_values() -> None:
    found = bootstrap([1.0, 1.0, 1.0, 5.0], ["a", "a", "a", "b"])
    assert found.mean == 2.0 and found.count == 2
    assert (found.low, found.high) == (1.0, 5.0), "one draw in four is the same cluster twice, for each of them"


def test_an_interval_agrees_with_the_normal_one_on_many_questions() -> None:
    values = np.random.default_rng(3).normal(0.4, 0.2, 2000)
    found = bootstrap(list(values))
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_seed_decides_the_draws() -> None:
    values = [0.0, 1.0, 2.0, 3.0, 10.0, 0.5]
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1)
    assert bootstrap(values, seed=1, samples=50) != bootstrap(values, seed=2, samples=50)


def test_draws_in_blocks_are_bounded_in_memory() -> None:
    """2000 draws of 5,000 values at once would be 80 MB for the picks alone, and 20,000 patterns of signs 100 MB."""
    values = np.random.default_rng(0).normal(size=5_000)
    tracemalloc.start()
    try:
        paired(values.tolist(), np.zeros(5_000).tolist())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 << 20


def test_one_question_has_no_width_and_shows_nothing() -> None:
    assert bootstrap([2.0]) == Estimate(2.0, 2.0, 2.0, 1)
    found = paired([2.0], [1.0])
    assert found.p == 1.0 and noise(found.difference)
    assert not non_inferior(found.difference, 0.5, "higher")


def test_equal_values_have_no_width() -> None:
    assert bootstrap([0.1] * 7) == Estimate(pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1), 7)  # type: ignore[arg-type]
    found = paired([0.1] * 7, [0.1] * 7)
    assert found.difference == Estimate(0.0, 0.0, 0.0, 7) and found.p == 1.0 and noise(found.difference)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: bootstrap([]), "values"),
        (lambda: bootstrap([1.0, math.nan]), r"values\[1\]: got nan"),
        (lambda: bootstrap([math.inf]), r"values\[0\]: got inf"),
        (lambda: bootstrap([1.0, 2.0], ["a"]), "clusters"),
        (lambda: bootstrap([1.0], samples=0), "samples"),
        (lambda: bootstrap([1.0], seed=-1), "seed"),
        (lambda: paired([], []), "a: got 'none'"),
        (lambda: paired([1.0, 2.0], [1.0]), "b: got '1 values'"),
        (lambda: paired([1.0, 2.0], [1.0, math.nan]), r"b\[1\]: got nan"),
        (lambda: holm([0.1, 1.5]), "p-value 1"),
        (lambda: holm([math.nan]), "p-value 0"),
        (lambda: non_inferior(Estimate(0, 0, 0, 9), -0.1, "higher"), "margin"),
        (lambda: non_inferior(Estimate(0, 0, 0, 9), math.nan, "lower"), "margin"),
    ],
)
def test_input_that_cannot_be_used_is_named(call, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput, match=named):
        call()


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=25))
def test_swapping_the_two_turns_the_sign_and_nothing_else(pairs: list[tuple[float, float]]) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    there, back = paired(a, b, samples=200), paired(b, a, samples=200)
    assert 0 < there.p <= 1 and there.p == back.p
    d = back.difference
    assert close(there.difference, Estimate(-d.mean, -d.high, -d.low, d.count))
    assert noise(there.difference) == noise(back.difference)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=14), st.integers(2, 4))
def test_copies_of_a_question_do_not_make_a_test_surer(pairs: list[tuple[float, float]], copies: int) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    clusters = [i for i in range(len(a)) for _ in range(copies)]
    once = paired(a, b, samples=50)
    again = paired([x for x in a for _ in range(copies)], [x for x in b for _ in range(copies)], clusters, samples=50)
    assert again.p == pytest.approx(once.p) and close(again.difference, once.difference)


def test_p_by_hand() -> None:
    """Differences 1, 2, 3: of the 8 patterns only +++ and --- reach 6. Then 1, 1, -1: all patterns reach 1."""
    assert paired([1, 2, 3], [0, 0, 0]).p == 2 / 8
    assert paired([1, 1, -1], [0, 0, 0]).p == 1.0
    assert paired([5.0] * 6, [0.0] * 6).p == 2 / 64, "six questions are the fewest that can show anything at 5%"
    assert paired([5.0] * 5, [0.0] * 5).p > 0.05
    assert paired([1, 2, 3, 7, 7], [0, 0, 0, 7, 7]).p == 2 / 8, "questions that do not differ have no sign"


@pytest.mark.parametrize("count", [4, 9, 14])
def test_p_agrees_with_scipy_where_all_patterns_are_tried(count: int) -> None:
    random = np.random.default_rng(count)
    a, b = random.normal(0.4, 1, count), random.normal(0, 1, count)

    def mean(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(x - y, axis=axis)

    expected = stats.permutation_test((a, b), mean, permutation_type="samples", n_resamples=np.inf, vectorized=True)
    assert paired(a.tolist(), b.tolist()).p == pytest.approx(expected.pvalue, rel=1e-12)


def test_drawn_patterns_come_near_to_all_patterns() -> None:
    differences = np.random.default_rng(5).normal(0.5, 1, 16)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=16)))
    exact = float(np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9))
    zeros = [0.0] * 16
    found = paired(differences.tolist(), zeros)
    assert 0.01 < exact < 0.5 and found.p == pytest.approx(exact, abs=0.015)
    assert paired(differences.tolist(), zeros) == found, "seeded"
    assert paired(list(range(1, 41)), [0.0] * 40).p == 1 / 20_001, "never 0: the sample itself is one pattern"


def test_a_test_is_rarely_wrong_where_there_is_no_difference() -> None:
    random = np.random.default_rng(11)
    ps = [paired(random.normal(size=12).tolist(), random.normal(size=12).tolist(), samples=1).p for _ in range(300)]
    assert 0.02 < np.mean(np.array(ps) <= 0.05) < 0.09


def test_holm_by_hand() -> None:
    """Holm 1979: sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, each at least the one before."""
    assert holm([0.01, 0.04, 0.03, 0.02]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2] and holm([]) == []


@given(shares)
def test_holm_corrects_upwards_and_keeps_the_ranking(ps: list[float]) -> None:
    found = holm(ps)
    assert all(p <= q <= 1 for p, q in zip(ps, found, strict=True))
    assert all(qa <= qb for (pa, qa), (pb, qb) in itertools.permutations(zip(ps, found, strict=True), 2) if pa <= pb)
    assert all(q <= min(1, len(ps) * p) for p, q in zip(ps, found, strict=True) if p == min(ps))


@given(shares, st.floats(0, 1))
def test_holm_gets_no_milder_with_more_tests(ps: list[float], further: float) -> None:
    assert all(after >= before for before, after in zip(holm(ps), holm([*ps, further]), strict=False))


@pytest.mark.parametrize(
    ("low", "high", "better", "expected"),
    [
        (-0.01, 0.05, "higher", True),
        (-0.02, 0.05, "higher", True),
        (-0.03, 0.05, "higher", False),
        (-0.5, 0.01, "lower", True),
        (-0.5, 0.03, "lower", False),
    ],
)
def test_non_inferior_looks_at_the_bad_end_of_the_interval(
    low: float, high: float, better: str, expected: bool
) -> None:
    difference = Estimate((low + high) / 2, low, high, 20)
    assert non_inferior(difference, 0.02, better) is expected  # type: ignore[arg-type]
    assert not non_inferior(Estimate(difference.mean, low, high, 5), 0.02, better)  # type: ignore[arg-type]


def test_noise_is_an_interval_that_holds_zero() -> None:
    assert noise(Estimate(0.1, -0.1, 0.3, 20)) and noise(Estimate(0.1, 0.0, 0.2, 20))
    assert not noise(Estimate(0.1, 0.05, 0.2, 20)) and not noise(Estimate(-0.1, -0.2, -0.05, 20))
    assert noise(Estimate(0.1, 0.05, 0.2, 5)), "five questions cannot tell"


@pytest.mark.parametrize("values", [["a"], [[1.0], [1.0, 2.0]], [10**400], [1e308] * 3])
def test_what_has_no_finite_sum_is_refused(values: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="values"):
        bootstrap(values)


def test_a_difference_beyond_a_floats_range_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a - b"):
        paired([1e308, 1], [-1e308, 2])


def test_a_ratio_of_means_by_hand() -> None:
    found = ratio([1.0, 2.0] * 4, [2.0, 4.0] * 4)
    assert found == Estimate(0.5, 0.5, 0.5, 8), "each draw has the same ratio"
    mixed = ratio([0.0, 2.0] * 4, [2.0, 2.0] * 4)
    assert mixed is not None and mixed.mean == 0.5 and 0 <= mixed.low < 0.5 < mixed.high <= 1


def test_a_ratio_to_what_may_be_chance_says_nothing() -> None:
    assert ratio([1.0] * 8, [1.0, -1.0] * 4) is None
    assert ratio([1.0] * 5, [1.0] * 5) is None, "five questions cannot tell"
    with pytest.raises(InvalidInput, match="denominators"):
        ratio([1.0] * 8, [1.0] * 7)

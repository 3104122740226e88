"""When computing beforehand pays: exact figures of streams with made-up costs."""

from __future__ import annotations

import pytest

from blend.errors import InvalidInput
from blend.eval import breakeven
from blend.eval.breakeven import Costs, Load, from_where, pays_after

COSTS = Costs(
    full=lambda tokens: 10.0 * tokens,
    suffix=lambda hit, tokens: 10.0 * (tokens - hit),
    blended=lambda tokens: 2.0 * tokens,
    precompute=lambda tokens: 10.0 * tokens,
)


@pytest.mark.parametrize(
    ("once", "ours", "theirs", "after"),
    [
        (10.0, [1, 1, 1, 1], [6, 6, 6, 6], 2),
        (11.0, [1, 1, 1, 1], [6, 6, 6, 6], 3),
        (100.0, [1, 1], [6, 6], None),
        (0.0, [1, 1], [6, 6], 0),
        (0.0, [6, 6], [1, 1], None),
        (4.0, [1, 1, 9], [6, 6, 1], None),
        (2.0, [1, 9, 1, 1], [6, 1, 6, 6], 3),
    ],
)
def test_what_was_spent_once_is_paid_back_where_it_stays_so(
    once: float, ours: list[float], theirs: list[float], after: int | None
) -> None:
    assert pays_after(once, ours, theirs) == after


def test_chunks_in_ever_new_orders_pay_and_a_prefix_cache_finds_nothing() -> None:
    a, b, c = (tuple(range(i, i + 32)) for i in (100, 200, 300))
    load = Load({0: (*a, *b, *c), 1: (*b, *c, *a), 2: (*c, *a, *b)}, [32, 32, 32], [0, 1, 2])
    found = breakeven.play(load, COSTS)
    assert (found.requests, found.tokens, found.precompute_ms) == (3, 96.0, 960.0)
    assert (found.full_ms, found.prefix_ms, found.blended_ms, found.prefix_hits) == (960.0, 960.0, 192.0, 0.0)
    assert (found.pays_against_full, found.pays_against_prefix) == (2, 2)
    assert not found.prefix_as_good


def test_one_question_over_and_over_is_better_served_by_a_prefix_cache() -> None:
    found = breakeven.play(Load({0: tuple(range(100))}, [100], [0] * 50), COSTS)
    assert found.prefix_hits == pytest.approx(49 * 96 / 5000)
    assert found.prefix_ms == pytest.approx((1000 + 49 * 40) / 50)
    assert found.prefix_as_good and found.pays_against_prefix is None
    assert found.pays_against_full == 2


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(InvalidInput, match="requests"):
        breakeven.play(Load({}, [], []), COSTS)


@pytest.mark.parametrize(
    ("found", "start"),
    [
        ([(0.0, False), (1.0, True), (2.0, True)], 1.0),
        ([(0.0, True), (1.0, False), (2.0, True)], 2.0),
        ([(1.0, False), (0.0, True)], None),
        ([], None),
    ],
)
def test_from_where_on_something_holds(found: list[tuple[float, bool]], start: float | None) -> None:
    assert from_where(found) == start

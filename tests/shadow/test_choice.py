"""A share of what comes is chosen: exactly, evenly, and not in step with it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from blend.shadow.choice import EvenShare


def chosen(share: float, count: int, seed: int = 0) -> list[int]:
    choice = EvenShare(share, seed)
    return [number for number in range(count) if choice.next()]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.1, 1 / 3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_share_is_exact_over_a_thousand_and_over_any_of_them(share: float, seed: int) -> None:
    found = chosen(share, 1000, seed)
    assert abs(len(found) - 1000 * share) <= 1
    for count in range(1, 1001):
        assert abs(sum(number < count for number in found) - count * share) <= 1 + 1e-9


def test_all_and_none() -> None:
    assert chosen(1, 1000) == list(range(1000))
    assert chosen(0, 1000) == []


def test_none_of_them_is_far_from_the_next_and_they_are_not_in_step() -> None:
    found = chosen(0.1, 1000)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert max(gaps) < 20
    assert len(set(gaps)) > 5
    assert len({number % 10 for number in found}) == 10


def test_a_seed_chooses_the_same_again_and_another_one_others() -> None:
    assert chosen(0.1, 1000, 3) == chosen(0.1, 1000, 3) != chosen(0.1, 1000, 4)

"""Zipf streams, and the prefix cache that they are played against."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidInput
from blend.eval import zipf


def test_shares_fall_with_the_rank_by_the_power_that_the_skew_says() -> None:
    assert zipf.shares(4, 0.0).tolist() == [0.25] * 4
    assert zipf.shares(3, 1.0).tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert zipf.shares(2, 2.0).tolist() == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize(("count", "skew"), [(0, 1.0), (3, -1.0), (3, float("nan")), (3, float("inf")), (3, 20.5)])
def test_shares_refuse_what_is_no_law(count: int, skew: float) -> None:
    with pytest.raises(InvalidInput):
        zipf.shares(count, skew)


def test_questions_find_different_passages_and_popular_ones_more_often() -> None:
    drawn = zipf.questions(200, 4, 20, 1.0, seed=3)
    assert drawn == zipf.questions(200, 4, 20, 1.0, seed=3)
    assert drawn != zipf.questions(200, 4, 20, 1.0, seed=4)
    assert all(len(set(passages)) == 4 and set(passages) <= set(range(20)) for passages in drawn)
    found = [sum(i in passages for passages in drawn) for i in range(20)]
    assert found[0] > 2 * found[10]
    with pytest.raises(InvalidInput, match="passages"):
        zipf.questions(3, 21, 20, 1.0, seed=0)


def test_a_stream_asks_popular_questions_more_often() -> None:
    asked = zipf.stream(1000, 10, 1.0, seed=0)
    assert asked == zipf.stream(1000, 10, 1.0, seed=0)
    assert set(asked) == set(range(10)) and asked.count(0) > 4 * asked.count(9)


def test_a_prefix_cache_finds_whole_blocks_of_what_was_there_before() -> None:
    cache = zipf.PrefixCache(block=4)
    first = list(range(10))
    assert cache.ask(first) == 0
    assert cache.ask(first) == 8
    assert cache.ask([*first[:6], 99, 99, 99]) == 4, "a block that differs ends the prefix"
    assert cache.ask([99, *first]) == 0, "the same tokens in another place are no prefix"
    assert cache.ask(first[:8]) == 4, "the last token is always computed"
    assert cache.ask([]) == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=6), st.integers(1, 4))
def test_a_prefix_cache_finds_the_longest_common_prefix(prompts: list[list[int]], block: int) -> None:
    cache = zipf.PrefixCache(block=block)
    for i, prompt in enumerate(prompts):
        common = 0
        for earlier in prompts[:i]:
            same = 0
            while same < min(len(prompt), len(earlier)) and prompt[same] == earlier[same]:
                same += 1
            common = max(common, same // block * block)
        # Blocks are common only as far as both prompts have them whole, and one token is left.
        assert cache.ask(prompt) == max(0, min(common, (len(prompt) - 1) // block * block))

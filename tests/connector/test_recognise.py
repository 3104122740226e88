"""Known chunks in prompts: found wherever they are, as a search through everything finds them, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend import Chunk, Part
from blend.connector.recognise import Recogniser
from blend.errors import InvalidInput

SECRET = bytes(range(32))
WINDOW, SEAM = 4, 2
Ids = tuple[int, ...]
Span = tuple[int, int, Ids, int]


def brute_force(known: Sequence[Ids], prompt: Ids, window: int, seam: int) -> list[Span]:
    """Every chunk at every place, token by token: start, end, the chunk, and its first token that is there."""
    copies: list[tuple[int, int, int, Ids]] = []
    for chunk in known:
        margin = min(seam, (len(chunk) - window) // 2)
        for at in range(-margin, len(prompt)) if margin >= 0 else ():
            same = [0 <= at + i < len(prompt) and prompt[at + i] == token for i, token in enumerate(chunk)]
            if not all(same[margin : len(chunk) - margin]):
                continue
            first, last = margin, len(chunk) - margin
            while first > 0 and same[first - 1]:
                first -= 1
            while last < len(chunk) and same[last]:
                last += 1
            copies.append((at, first, last, chunk))
    copies.sort(key=lambda c: (c[1] - c[2], c[0] + c[1], known.index(c[3])))
    taken, found = [False] * len(prompt), []
    for at, first, last, chunk in copies:
        margin = min(seam, (len(chunk) - window) // 2)
        inner, outer = at + margin, at + len(chunk) - margin
        if any(taken[inner:outer]):
            continue
        start, end = inner, outer
        while start > at + first and not taken[start - 1]:
            start -= 1
        while end < at + last and not taken[end]:
            end += 1
        taken[start:end] = [True] * (end - start)
        found.append((start, end, chunk, start - at))
    return sorted(found)


def spans(found: Sequence[tuple[int, Part]]) -> list[Span]:
    return [(start, start + len(part), part.chunk.token_ids, part.first) for start, part in found]


def recogniser(*chunks: Sequence[int], tenant: str = "a", crowd: int = 1000, **changes: int) -> Recogniser:
    made = Recogniser(SECRET, **{"window": WINDOW, "seam": SEAM, **changes}, crowd=crowd)
    for chunk in chunks:
        made.learn(tenant, chunk)
    return made


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[Ids], Ids]:
    """Chunks of few different tokens, and a prompt of pieces of them and of other tokens."""
    token = st.integers(0, draw(st.sampled_from([1, 2, 30])))
    ids = st.lists(token, max_size=16).map(tuple)
    chunks = draw(st.lists(st.lists(token, min_size=1, max_size=16).map(tuple), min_size=1, max_size=5))
    cut = st.tuples(st.sampled_from(chunks), st.integers(0, 3), st.integers(0, 3))
    pieces = draw(st.lists(st.one_of(ids, cut.map(lambda c: c[0][c[1] : len(c[0]) - c[2]])), max_size=8))
    return chunks, tuple(token for piece in pieces for token in piece)


@settings(max_examples=600, deadline=None)
@given(made=prompts(), seam=st.integers(0, 3), window=st.integers(1, 6))
def test_what_is_found_is_what_a_search_through_everything_finds(
    made: tuple[list[Ids], Ids], seam: int, window: int
) -> None:
    chunks, prompt = made
    found = spans(recogniser(*chunks, seam=seam, window=window).find("a", prompt))
    assert found == brute_force(list(dict.fromkeys(chunks)), prompt, window, seam)


@settings(max_examples=200, deadline=None)
@given(made=prompts(), crowd=st.integers(1, 2), limit=st.integers(0, 40))
def test_what_is_found_is_always_there(made: tuple[list[Ids], Ids], crowd: int, limit: int) -> None:
    chunks, prompt = made
    small = recogniser(*chunks, crowd=crowd, limit=limit)
    assert small.tokens <= limit
    found = small.find("a", prompt)
    for start, part in found:
        assert prompt[start : start + len(part)] == part.token_ids
        assert part.chunk.token_ids in chunks
        assert max(part.first, len(part.chunk) - part.end) <= SEAM
    assert all(start + len(part) <= after for (start, part), (after, _) in pairwise(found))


@settings(max_examples=100, deadline=None)
@given(made=prompts(), gone=st.sets(st.integers(0, 4)))
def test_what_is_forgotten_is_as_if_it_had_never_been_known(made: tuple[list[Ids], Ids], gone: set[int]) -> None:
    chunks, prompt = made
    forgotten = {chunk for number, chunk in enumerate(chunks) if number in gone}
    some = recogniser(*chunks)
    for chunk in forgotten:
        assert some.forget("a", chunk) == (len(chunk) >= WINDOW)
        assert not some.forget("a", chunk)
    others = recogniser(*(chunk for chunk in chunks if chunk not in forgotten))
    assert (some.find("a", prompt), some.tokens, len(some)) == (others.find("a", prompt), others.tokens, len(others))


ONE, TWO = tuple(range(100, 140)), tuple(range(200, 230))


def test_chunks_are_found_at_any_offset_again_and_again_and_with_other_seams() -> None:
    known = recogniser(ONE, TWO)
    prompt = (1, 2, 3, *ONE, *TWO[1:], 4, *ONE[2:-1], 5, *ONE[3:], *TWO[:-2])
    found = known.find("a", prompt)
    assert found == [
        (3, Part(Chunk(ONE), 0, 40)),
        (43, Part(Chunk(TWO), 1, 30)),
        (73, Part(Chunk(ONE), 2, 39)),
        (148, Part(Chunk(TWO), 0, 28)),
    ]


def test_of_overlapping_copies_the_longest_is_taken_and_others_cut_down() -> None:
    longer = (*ONE, 7, 8, 9)
    assert spans(recogniser(ONE, longer).find("a", (1, *longer, *ONE))) == [(1, 44, longer, 0), (44, 84, ONE, 0)]
    touching = (*ONE[-2:], *TWO)  # the same two tokens end one and begin the other
    found = spans(recogniser(ONE, touching).find("a", (*ONE, *TWO)))
    assert found == [(0, 40, ONE, 0), (40, 70, touching, 2)]


def test_a_chunk_shorter_than_a_window_is_not_recognised_and_one_as_long_only_whole() -> None:
    known = recogniser(ONE[:3], TWO[:4])
    assert len(known) == 1
    assert spans(known.find("a", (*ONE[:3], 5, *TWO[:4]))) == [(4, 8, TWO[:4], 0)]
    assert known.find("a", TWO[1:4]) == known.find("a", ()) == []


def test_tenants_do_not_see_each_others_chunks() -> None:
    known = recogniser(ONE)
    known.learn("b", TWO)
    prompt = (*ONE, *TWO)
    assert [spans(known.find(tenant, prompt)) for tenant in ("a", "b", "c")] == [
        [(0, 40, ONE, 0)],
        [(40, 70, TWO, 0)],
        [],
    ]
    assert not known.forget("b", ONE)
    assert known.forget("a", ONE)
    assert (known.find("a", prompt), len(known.find("b", prompt))) == ([], 1)


def test_beyond_the_limit_the_chunks_go_that_were_longest_of_no_use() -> None:
    third = tuple(range(300, 340))
    known = recogniser(ONE, TWO, limit=80)
    assert known.find("a", ONE)  # a use
    known.learn("b", third)
    assert (known.tokens, known.find("a", TWO)) == (80, [])
    known.learn("a", ONE)  # another one
    known.learn("a", TWO)
    assert known.find("b", third) == []
    assert not known.learn("a", range(1000, 1081)), "one that is longer than the limit drives nobody out"
    assert (known.tokens, len(known)) == (70, 2)


def test_a_crowd_with_the_same_windows_is_not_let_in() -> None:
    known = recogniser(*([7] * n for n in range(20, 30)), crowd=4)
    assert len(known) == 4
    assert not known.learn("a", (*[7] * 20, 8)), "what differs is at the seam"
    assert known.learn("a", (*[7] * 20, 8, 9, 9))


@pytest.mark.parametrize("wrong", [[-1], [1 << 32], [1.0], ["a"], [True], [[1, 2]]], ids=str)
def test_what_is_no_token_id_is_refused(wrong: list[int]) -> None:
    known = recogniser(ONE)
    for method in (known.learn, known.forget, known.find):
        with pytest.raises(InvalidInput, match="token_ids"):
            method("a", wrong)


@pytest.mark.parametrize("changes", [{"window": 0}, {"seam": -1}, {"limit": -1}, {"crowd": 0}, {"seam": True}], ids=str)
def test_wrong_settings_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(changes))):
        recogniser(**changes)
    with pytest.raises(InvalidInput, match="secret"):
        Recogniser(b"short")

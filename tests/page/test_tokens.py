"""Prompts cut into pieces, token by token."""

from __future__ import annotations

import math

import pytest

from blend.errors import InvalidInput
from blend.page import token_map

STATES = ["mandatory", "cached", "recomputed", "cached", "mandatory"]


def test_pieces_are_chunks_and_what_is_between_them() -> None:
    found = token_map(list("abcde"), STATES, [(1, 3), (3, 4)], titles=["one", "two"])
    shape = [(piece.chunk, piece.title, "".join(token.text for token in piece.tokens)) for piece in found.pieces]
    assert shape == [(0, "", "a"), (1, "one", "bc"), (2, "two", "d"), (0, "", "e")]
    assert found.states == {"mandatory": 2, "cached": 2, "recomputed": 1}
    assert not found.scored


def test_shades_are_ranks_and_what_is_no_number_has_none() -> None:
    scores = [None, 1e-9, 1e9, math.nan, math.inf]
    found = token_map(list("abcde"), STATES, [], scores=scores)
    (piece,) = found.pieces
    assert [token.shade for token in piece.tokens] == [None, 0, 4, None, None]
    assert [token.score for token in piece.tokens] == [None, 1e-9, 1e9, None, None]
    assert found.scored


@pytest.mark.parametrize(
    ("states", "chunks", "scores", "named"),
    [
        (STATES[:1], [], None, "state"),
        (STATES, [], [0.5], "scores"),
        (STATES, [(0, 3), (2, 4)], None, "chunks"),
        (STATES, [(0, 9)], None, "chunks"),
        (STATES, [(3, 1)], None, "chunks"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    states: list[str], chunks: list[tuple[int, int]], scores: list[float | None] | None, named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        token_map(list("abcde"), states, chunks, scores=scores)

"""A prompt's tokens, piece by piece, with what became of each."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blend.errors import InvalidInput

SHADES = 8
"""Steps of shading. A token's is the rank of its score: scores are so uneven that all but a few would look alike."""


@dataclass(frozen=True)
class Token:
    """One token: its text, what became of it, its score (``None``: it had none), and its shade, 0 to SHADES - 1."""

    text: str
    state: str
    score: float | None
    shade: int | None


@dataclass(frozen=True)
class Piece:
    """Tokens in a row: a chunk with its number from 1 and a title, or text between chunks, whose number is 0."""

    chunk: int
    title: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Map:
    """A prompt in pieces, with the number of tokens of each state; ``scored``: whether any token has a score."""

    states: Mapping[str, int]
    pieces: tuple[Piece, ...]
    scored: bool


def token_map(
    texts: Sequence[str],
    states: Sequence[str],
    chunks: Sequence[tuple[int, int]],
    *,
    scores: Sequence[float | None] | None = None,
    titles: Sequence[str] = (),
) -> Map:
    """Cut a prompt at the borders of its chunks.

    Args:
        texts, states: of each token; the style sheet knows the states ``cached``, ``chosen``, ``recomputed``,
            ``mandatory``, ``missed`` and ``unused``.
        chunks: ``(start, end)`` of each, end exclusive.
        scores: of each token, if tokens have any.
        titles: of each chunk, in order, if chunks have any.

    Raises:
        InvalidInput: not one state and one score a token, or chunks that overlap or leave the prompt.
    """
    scores = [None] * len(texts) if scores is None else scores
    for what, values in (("state", states), ("scores", scores)):
        if len(values) != len(texts):
            raise InvalidInput(f"tokens: {what}", f"{len(values)} values", f"one for each of {len(texts)} tokens")
    known = [None if score is None or not math.isfinite(score) else score for score in scores]
    ranked = sorted({score for score in known if score is not None})
    tokens = [
        Token(text, state, score, None if score is None else bisect_left(ranked, score) * SHADES // len(ranked))
        for text, state, score in zip(texts, states, known, strict=True)
    ]
    named = dict(enumerate(titles, 1))
    cuts = _cuts(len(tokens), sorted(chunks))
    pieces = tuple(Piece(n, named.get(n, ""), tuple(tokens[start:end])) for n, start, end in cuts if start < end)
    return Map({state: states.count(state) for state in dict.fromkeys(states)}, pieces, bool(ranked))


def _cuts(end: int, chunks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the number, start and end of every chunk, and of what lies before, between and behind them."""
    borders = [0, *(place for chunk in chunks for place in chunk), end]
    if any(a > b for a, b in pairwise(borders)):
        raise InvalidInput("tokens: chunks", chunks, f"spans within 0 and {end} that do not overlap")
    for i, (a, b) in enumerate(pairwise(borders)):
        yield (i + 1) // 2 if i % 2 else 0, a, b

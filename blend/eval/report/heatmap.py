"""One prompt's tokens as one method treated them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from blend.errors import InvalidInput
from blend.eval.report.series import finite, name
from blend.eval.values import Heatmap, State

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
    """Tokens in a row: a chunk with its number from 1, or text between chunks, whose number is 0."""

    chunk: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Map:
    """A prompt in pieces, with the number of tokens of each state."""

    question: str
    method: str
    states: Mapping[State, int]
    pieces: tuple[Piece, ...]


def heatmap(found: Heatmap) -> Map:
    """Cut a prompt at the borders of its chunks.

    Raises:
        InvalidInput: not one state and one score a token, or chunks that overlap or leave the prompt.
    """
    for what, values in (("state", found.state), ("scores", found.scores)):
        if len(values) != len(found.tokens):
            raise InvalidInput(
                f"heatmap: {what}", f"{len(values)} values", f"one for each of {len(found.tokens)} tokens"
            )
    scores = [finite(score) for score in found.scores]
    ranked = sorted({score for score in scores if score is not None})
    tokens = [
        Token(text, state, score, None if score is None else bisect_left(ranked, score) * SHADES // len(ranked))
        for text, state, score in zip(found.tokens, found.state, scores, strict=True)
    ]
    pieces = tuple(Piece(chunk, tuple(tokens[start:end])) for chunk, start, end in _cuts(found) if start < end)
    states = {state: found.state.count(state) for state in dict.fromkeys(found.state)}
    return Map(found.question, name(found.method, found.ratio), states, pieces)


def _cuts(found: Heatmap) -> Iterator[tuple[int, int, int]]:
    """Yield the number, start and end of every chunk, and of what lies before, between and behind them."""
    end = len(found.tokens)
    chunks = sorted((start, stop) for start, stop in found.chunks)
    borders = [0, *(place for chunk in chunks for place in chunk), end]
    if any(a > b for a, b in pairwise(borders)):
        raise InvalidInput("heatmap: chunks", chunks, f"spans within 0 and {end} that do not overlap")
    for i, (a, b) in enumerate(pairwise(borders)):
        yield (i + 1) // 2 if i % 2 else 0, a, b

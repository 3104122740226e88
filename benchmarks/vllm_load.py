"""Prompts for a vLLM that blends: of an exact length, with an exact share of stored tokens, out of made-up passages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from made_up import sentences

from blend import Chunk, Prompt, Text

MOST = 0.98
"""The largest share of a prompt that passages make; a header and a question make the rest."""

FEW = 0.9
"""The share of stored tokens that is held against the bound."""

HEADER = 24
"""Tokens of the header, or a third of what is no passage where that is less."""

POOL = 2
"""How many times as many passages are stored as a prompt has."""

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Request:
    """A prompt, and how many of its tokens belong to chunks that the store holds."""

    prompt: Prompt
    stored: int


class Mix:
    """Requests of ``tokens`` tokens each, of which the share ``stored`` is in the store.

    Passages of about ``passage`` tokens, all of one length, are drawn from a pool; a share below :data:`MOST` is
    reached by a passage of each request's own, in the middle, that nobody has stored. No two requests are alike, and
    each number makes the same request again.
    """

    def __init__(self, tokenize: Tokenize, tokens: int, stored: float = MOST, passage: int = 500) -> None:
        self._tokenize = tokenize
        self._count = max(2, round(tokens * stored / passage))
        size = int(tokens * stored) // self._count
        around = tokens - int(tokens * max(stored, MOST)) // self._count * self._count
        self._missed = tokens - around - size * self._count
        self._header, self._question = _split(around)
        if size < 1 or self._header < 1:
            raise SystemExit(f"{tokens} tokens, {stored:.0%} of them stored, leave no room for header and question")
        self.tokens, self.share = tokens, stored
        self.pool = [self._passage(f"stored {number}", size) for number in range(POOL * self._count)]

    def request(self, number: int) -> Request:
        """The request of this number."""
        passages = random.Random(number).sample(self.pool, self._count)
        stored = sum(map(len, passages))
        if self._missed:
            passages.insert(self._count // 2, self._passage(f"own {number}", self._missed))
        header = self._text("header", "Answer the question from the passages. ", self._header)
        asked = f"\n{number}. Question: " + sentences(f"question {number}", self._question)
        return Request(Prompt([header, *passages, self._text(f"question {number}", asked, self._question)]), stored)

    def stream(self, number: int, tokens: int) -> Prompt:
        """A prompt of so many tokens without chunks."""
        return Prompt([self._text(f"stream {number}", f"Story {number}. ", tokens)])

    def filling(self) -> list[Prompt]:
        """Prompts that name every passage of the pool."""
        groups = [self.pool[at : at + self._count] for at in range(0, len(self.pool), self._count)]
        return [Prompt([*group, self._text("filling", "What is said? ", 1)]) for group in groups]

    def _passage(self, name: str, tokens: int) -> Chunk:
        return Chunk(self._ids(name, "", tokens))

    def _text(self, name: str, text: str, tokens: int) -> Text:
        return Text(self._ids(name, text, tokens))

    def _ids(self, name: str, text: str, tokens: int) -> Sequence[int]:
        """Exactly so many tokens of ``text``, made longer by sentences."""
        return tuple(self._tokenize(text + sentences(name, tokens)))[:tokens]


def _split(around: int) -> tuple[int, int]:
    header = min(HEADER, around // 3)
    return header, around - header

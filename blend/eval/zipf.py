"""Requests as services see them: a few questions and passages asked for often, most of them seldom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from blend.errors import InvalidInput

BLOCK = 16
"""Tokens that an exact prefix cache keeps and finds as one, as vLLM's default has it."""


STEEPEST = 20.0
"""The largest skew. Even here the second of two ranks is drawn once in a million; steeper laws leave ranks no share."""


def check(skew: float) -> None:
    """Raise :class:`~blend.errors.InvalidInput` for a skew outside 0 to :data:`STEEPEST`."""
    if not 0 <= skew <= STEEPEST:
        raise InvalidInput("skew", skew, f"a number from 0 to {STEEPEST:g}")


def shares(count: int, skew: float) -> npt.NDArray[np.float64]:
    """Return the shares ``[count]`` of ranks 1 to ``count`` under Zipf's law: in proportion to ``1 / rank ** skew``.

    Skew 0 asks for everything equally often; words of a language have about 1.

    Raises:
        InvalidInput: no ranks, or as :func:`check`.
    """
    if count < 1:
        raise InvalidInput("count", count, "1 or more")
    check(skew)
    weights = np.arange(1, count + 1, dtype=np.float64) ** -skew
    drawn: npt.NDArray[np.float64] = weights / weights.sum()
    return drawn


def questions(count: int, passages: int, corpus: int, skew: float, seed: int) -> list[tuple[int, ...]]:
    """Return the passages, by number, that each of ``count`` questions finds, in the order of its prompt.

    The ``passages`` of one question differ; popular ones are found by more questions (by Zipf's law over a corpus of
    ``corpus`` passages), and in an order of each question's own, for it is by closeness to that question.

    Raises:
        InvalidInput: more passages to a question than there are, or as :func:`shares`.
    """
    if not 1 <= passages <= corpus:
        raise InvalidInput("passages", passages, f"1 to {corpus}, as many as the corpus has")
    random = np.random.default_rng([seed, 0])
    popularity = shares(corpus, skew)
    return [tuple(random.choice(corpus, passages, replace=False, p=popularity).tolist()) for _ in range(count)]


def stream(requests: int, count: int, skew: float, seed: int) -> list[int]:
    """Return which of ``count`` questions each of ``requests`` requests asks, by Zipf's law.

    Raises:
        InvalidInput: as :func:`shares`.
    """
    random = np.random.default_rng([seed, 1])
    return [int(q) for q in random.choice(count, requests, p=shares(count, skew))]


@dataclass
class PrefixCache:
    """What an exact prefix cache without limit would find: the longest beginning that an earlier prompt had too.

    It finds whole blocks of ``block`` tokens, and never a prompt's last token, whose logits are wanted.
    """

    block: int = BLOCK
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def ask(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens of this prompt an earlier one had; from now on this one is an earlier one."""
        hit, whole = 0, True
        digest = blake2b(digest_size=16)
        for start in range(0, len(token_ids) - self.block + 1, self.block):
            digest.update(np.asarray(token_ids[start : start + self.block], dtype=np.int64).tobytes())
            name = digest.digest()
            whole = whole and name in self._seen
            self._seen.add(name)
            if whole:
                hit = start + self.block
        return min(hit, max(0, len(token_ids) - 1) // self.block * self.block)

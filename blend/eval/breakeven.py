"""When chunks that were computed beforehand have paid for themselves, and when a prefix cache would do as well.

Times that were measured once are played over long streams of requests, so that thousands need not be run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from blend.errors import InvalidInput
from blend.eval import zipf


@dataclass(frozen=True)
class Costs:
    """Measured times in milliseconds.

    Args:
        full: full prefill of so many tokens.
        suffix: prefill of the tokens behind a cached prefix, by the prefix's tokens and the whole prompt's.
        blended: time to first token of a prompt of so many tokens with every chunk stored.
        precompute: encoding and storing a chunk of so many tokens.
    """

    full: Callable[[int], float]
    suffix: Callable[[int, int], float]
    blended: Callable[[int], float]
    precompute: Callable[[int], float]


@dataclass(frozen=True)
class Load:
    """A stream of requests.

    Args:
        prompts: token ids of the prompt of each question that is asked, by the question's number.
        chunks: tokens of each passage that one of them finds, which are computed beforehand.
        requests: the question of each request, by number.
    """

    prompts: Mapping[int, Sequence[int]]
    chunks: Sequence[int]
    requests: Sequence[int]


@dataclass(frozen=True)
class Balance:
    """A stream played over measured times; means in milliseconds a request, the first of them included.

    ``prefix_hits`` is the share of prompt tokens that an exact prefix cache without limit found. ``pays_against_full``
    and ``pays_against_prefix`` are the requests after which all time spent, computing the chunks included, is no more
    than with that alternative, and stays so to the stream's end; ``None`` where that does not come.
    """

    requests: int
    tokens: float
    precompute_ms: float
    full_ms: float
    prefix_ms: float
    blended_ms: float
    prefix_hits: float
    pays_against_full: int | None
    pays_against_prefix: int | None

    @property
    def prefix_as_good(self) -> bool:
        """Whether the prefix cache answers as fast, even with the chunks' own cost left aside."""
        return self.prefix_ms <= self.blended_ms


def play(load: Load, costs: Costs) -> Balance:
    """Return what a stream costs with full prefill, with an exact prefix cache, and with chunks computed beforehand.

    The prefix cache is an ideal one: it has no limit, and finding and fetching cost it nothing.

    Raises:
        InvalidInput: the stream has no requests.
    """
    if not load.requests:
        raise InvalidInput("requests", 0, "1 or more")
    cache = zipf.PrefixCache()
    hits = [cache.ask(load.prompts[question]) for question in load.requests]
    lengths = [len(load.prompts[question]) for question in load.requests]
    full = [costs.full(n) for n in lengths]
    prefix = [costs.suffix(hit, n) for hit, n in zip(hits, lengths, strict=True)]
    blended = [costs.blended(n) for n in lengths]
    once = sum(costs.precompute(tokens) for tokens in load.chunks)
    count = len(lengths)
    return Balance(
        requests=count,
        tokens=sum(lengths) / count,
        precompute_ms=once,
        full_ms=sum(full) / count,
        prefix_ms=sum(prefix) / count,
        blended_ms=sum(blended) / count,
        prefix_hits=sum(hits) / sum(lengths),
        pays_against_full=pays_after(once, blended, full),
        pays_against_prefix=pays_after(once, blended, prefix),
    )


def pays_after(once: float, ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """Return after how many requests ``once`` and our times sum to no more than theirs, from there to the end.

    ``None`` where that does not come within the requests given; 0 where nothing has to be paid back.
    """
    ahead = [0.0, *accumulate(b - a for a, b in zip(ours, theirs, strict=True))]
    paid = None
    for count in range(len(ahead) - 1, -1, -1):
        if ahead[count] < once:
            break
        paid = count
    return paid


def from_where(found: Sequence[tuple[float, bool]]) -> float | None:
    """Return the least place from which on everything is true, or ``None`` if the last place is not."""
    start = None
    for place, holds in sorted(found):
        if not holds:
            start = None
        elif start is None:
            start = place
    return start

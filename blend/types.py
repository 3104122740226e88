"""The values that go in and come out: chunks, prompts, plans, answers and their reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt

if TYPE_CHECKING:
    import torch

    from blend.recompute.canvas import Canvas

EXACT_METHODS = ("full", "prefix")
"""Methods that lose nothing against full prefill."""

PLAIN_METHODS = (*EXACT_METHODS, "reuse")
"""Methods that select nothing: no cache, the exact prefix alone, or every chunk as it is."""

METHODS = ("auto", *PLAIN_METHODS, "random", "head", "deviation", "query")
"""Every method of the engine, ``auto`` first. Evaluation has more, which no plan may name."""

Variant = Literal["plain", "conditioned", "best"]
Outcome = Literal["hit", "miss", "failed", "unused"]
Finish = Literal["stop", "length", "cancelled", "deadline"]

MAX_STOPS = 16
"""Most stop strings of one request."""

MAX_STOP_CHARS = 256
"""Most characters of one of them."""

MIN_TEMPERATURE = 1e-5
"""Below this temperature tokens are not drawn: nothing but the likeliest would be, and float32 would overflow."""

_SEGMENTS = "Chunk, Part and Text segments"


def _ids(what: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    ids = as_token_ids(token_ids)
    if not ids:
        raise InvalidPrompt(what, "no tokens", "at least one token id")
    if min(ids) < 0:
        raise InvalidPrompt(what, min(ids), "token ids of 0 or more")
    return ids


@dataclass(frozen=True)
class Chunk:
    """A passage whose KV may be stored and reused wherever it turns up.

    ``token_ids`` come from :meth:`blend.Engine.tokenize`; any iterable of ints is taken and kept as a tuple.
    """

    token_ids: tuple[int, ...]

    def __init__(self, token_ids: Iterable[int]) -> None:
        object.__setattr__(self, "token_ids", _ids("chunk", token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Text:
    """Tokens that are always computed: template text, separators, the question."""

    token_ids: tuple[int, ...]

    def __init__(self, token_ids: Iterable[int]) -> None:
        object.__setattr__(self, "token_ids", _ids("text", token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Part:
    """Tokens ``first`` to ``end``, exclusive, of a chunk, in a prompt that has not all of it.

    In a prompt that was tokenized as one text, a passage's outermost tokens may be merged with what stands beside it;
    those between are the chunk's. What is stored and looked up is always the whole chunk.

    Raises:
        InvalidPrompt: not a chunk, or no token of it.
    """

    chunk: Chunk
    first: int
    end: int

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, Chunk):
            raise InvalidPrompt("part.chunk", self.chunk, "a Chunk")
        if not (_is_integer(self.first) and _is_integer(self.end) and 0 <= self.first < self.end <= len(self.chunk)):
            raise InvalidPrompt("part", (self.first, self.end), f"integers with 0 <= first < end <= {len(self.chunk)}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the prompt has."""
        return self.chunk.token_ids[self.first : self.end]

    def __len__(self) -> int:
        return self.end - self.first


Segment: TypeAlias = "Chunk | Part | Text"


@dataclass(frozen=True)
class Prompt:
    """Segments one after another. Their token ids are concatenated, never decoded and encoded again."""

    segments: tuple[Segment, ...]

    def __init__(self, segments: Iterable[Segment]) -> None:
        if not isinstance(segments, Iterable):
            raise InvalidPrompt("prompt", segments, _SEGMENTS)
        kept = tuple(segments)
        if not kept:
            raise InvalidPrompt("prompt", "no segments", "at least one Chunk, Part or Text")
        for segment in kept:
            if not isinstance(segment, (Chunk, Part, Text)):
                raise InvalidPrompt("prompt", segment, _SEGMENTS)
        object.__setattr__(self, "segments", kept)

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in order."""
        return tuple(t for s in self.segments for t in s.token_ids)

    def spans(self) -> Iterator[tuple[int, int, Segment]]:
        """Yield ``(start, end, segment)`` with positions in the prompt, end exclusive."""
        start = 0
        for segment in self.segments:
            yield start, start + len(segment), segment
            start += len(segment)

    def parts(self) -> Iterator[tuple[int, Part]]:
        """Yield position and part for all that may be stored: a whole chunk as the part that is all of it."""
        for start, _, segment in self.spans():
            if isinstance(segment, Chunk):
                yield start, Part(segment, 0, len(segment))
            elif isinstance(segment, Part):
                yield start, segment


@dataclass(frozen=True)
class Plan:
    """How a prompt is to be prefilled.

    Args:
        method: ``full``, ``prefix``, ``reuse``, ``random``, ``head``, ``deviation``, ``query``, or ``auto``.
        ratio: share of the cached tokens to select, 0 to 1, for a method that selects (default 0.15).
        max_charged: cap on the charged share, probes included, 0 to 1, for ``auto`` (default 0.15) and methods that
            select.
        max_kl: quality target, for ``auto`` alone: the upper 95% bound of the calibrated mean first-token KL, in nats,
            may not exceed it.
        variant: which stored variant of a chunk to use; ``best`` prefers ``conditioned``.

    Raises:
        InvalidPlan: a value is out of range, or of no meaning with this method. An unknown method is refused by the
            engine, which knows them all.
    """

    method: str = "auto"
    ratio: float | None = None
    max_charged: float | None = None
    max_kl: float | None = None
    variant: Variant = "best"

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise InvalidPlan("method", self.method, "the name of a method")
        for name in ("ratio", "max_charged"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 <= value <= 1.0):
                raise InvalidPlan(name, value, "a number from 0 to 1")
        if self.max_kl is not None and not (_is_number(self.max_kl) and self.max_kl >= 0.0):
            raise InvalidPlan("max_kl", self.max_kl, "a number of 0 or more (nats)")
        if self.variant not in ("plain", "conditioned", "best"):
            raise InvalidPlan("variant", self.variant, "plain, conditioned or best")
        if self.ratio is not None and self.method in ("auto", *PLAIN_METHODS):
            raise InvalidPlan("ratio", self.ratio, f"none with method {self.method}; methods that select take one")
        if self.max_charged is not None and self.method in PLAIN_METHODS:
            raise InvalidPlan("max_charged", self.max_charged, f"none with method {self.method}, which selects nothing")
        if self.max_kl is not None and self.method != "auto":
            raise InvalidPlan("max_kl", self.max_kl, "none with a named method; auto takes one")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # Comparing instead of math.isfinite, which an integer beyond a float's range makes overflow.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


@dataclass(frozen=True)
class Sampling:
    """How an answer's tokens are chosen, and when it ends. The default is greedy.

    Args:
        temperature: what logits are divided by, 0 to 100; below 1e-5 the likeliest token is taken always.
        top_p: tokens are drawn from the likeliest ones that have this share together, above 0, at most 1.
        top_k: and from so many of the likeliest ones at most; 0: all.
        seed: of the request's own generator, 0 to 2^63 - 1; the same seed gives the same answer. ``None``: any.
        stop: strings that end the answer, which is cut off before them; up to 16, of 1 to 256 characters each.
        max_new_tokens: most tokens of the answer.

    Raises:
        InvalidInput: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise InvalidInput("temperature", self.temperature, "a number from 0 to 100")
        if not (_is_number(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidInput("top_p", self.top_p, "a number above 0, at most 1")
        if not (_is_integer(self.top_k) and 0 <= self.top_k < 2**31):
            raise InvalidInput("top_k", self.top_k, "an integer of 0 or more")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 2**63):
            raise InvalidInput("seed", self.seed, "an integer from 0 to 2^63 - 1, or none")
        stop: object = self.stop  # one string would be taken for its characters
        if isinstance(stop, str) or not isinstance(stop, Iterable):
            raise InvalidInput("stop", stop, "a sequence of strings")
        object.__setattr__(self, "stop", tuple(stop))
        if len(self.stop) > MAX_STOPS:
            raise InvalidInput("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidInput("stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
        if not (_is_integer(self.max_new_tokens) and self.max_new_tokens >= 1):
            raise InvalidInput("max_new_tokens", self.max_new_tokens, "an integer of 1 or more")


@dataclass(frozen=True)
class ChunkReport:
    """What became of one chunk of the prompt, or of the part of one that the prompt has.

    ``key`` is the chunk's content key; ``start`` and ``tokens`` are of what the prompt has of it.
    ``outcome``: ``hit`` (loaded, verified and used), ``miss`` (not stored, or not there in the time that the
    prefetch policy gives), ``failed`` (stored, but a tier failed or the bytes did not verify), ``unused`` (the plan
    did not want it). ``nbytes`` counts payload bytes that were read.
    """

    key: str
    start: int
    tokens: int
    outcome: Outcome
    tier: str | None = None
    variant: str | None = None
    nbytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Timings:
    """Where the milliseconds went, from the request's arrival to its first token."""

    queue: float = 0.0
    lookup: float = 0.0
    fetch: float = 0.0
    rotate: float = 0.0
    select: float = 0.0
    recompute: float = 0.0
    first_token: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token in milliseconds, fetch and queue included."""
        return self.first_token


class Phase(NamedTuple):
    """A stretch of a request's time: ``start`` and ``end`` are readings of :func:`time.perf_counter`.

    ``name`` is one of :class:`Timings`; ``layer`` is the one that was loaded or rotated, where it was one.
    """

    name: str
    start: float
    end: float
    layer: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The same prompt at full prefill: its time in ms, KL(full ‖ blended) of the first token in nats, and top-1."""

    full_ms: float
    first_token_kl: float
    top1_agrees: bool


@dataclass(frozen=True)
class Report:
    """What one request did and what it cost. Token counts are of the prompt; ratios are shares of ``cached``.

    ``charged_ratio`` is the sum over layers of freshly computed reusable tokens over layers × reusable tokens,
    the selector's own probe passes charged in full. ``full_estimate_ms`` is what a full prefill would take, and
    ``predicted_ms`` what this request was predicted to, from its admission to its first token without queueing, once it
    was known what was loaded; both are in milliseconds, and 0 while nothing is known. ``predicted_kl`` is the mean
    first-token KL against full prefill, in nats, that the calibration expects of what ``auto`` chose, 0 where nothing
    is lost; ``None`` where it says nothing. ``phases`` is where the time went in detail, for traces of this process: it
    goes nowhere else.
    """

    mode: str
    reason: str
    tokens: int
    cached: int
    mandatory: int
    selected: int
    requested_ratio: float
    selected_ratio: float
    charged_ratio: float
    chunks: tuple[ChunkReport, ...]
    timings: Timings
    full_estimate_ms: float
    warnings: tuple[str, ...] = ()
    recomputed_positions: tuple[int, ...] | None = None
    comparison: Comparison | None = None
    predicted_ms: float = 0.0
    predicted_kl: float | None = None
    phases: tuple[Phase, ...] = field(default=(), repr=False, compare=False)

    @property
    def full_ms(self) -> float:
        """Full-prefill time in ms: measured where ``compare_full`` was asked for, else estimated."""
        return self.comparison.full_ms if self.comparison else self.full_estimate_ms

    @property
    def speedup(self) -> float:
        """Full-prefill time over this request's TTFT."""
        return self.full_ms / self.timings.ttft if self.timings.ttft > 0 else math.inf


@dataclass(frozen=True)
class Usage:
    """Tokens of one request: the prompt's, those of them whose KV came out of the store, the answer's."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    ``finish_reason`` is ``stop`` (an end token, which is no part of the answer, or a stop string, which is no part of
    ``text``), ``length`` (``max_new_tokens``), ``cancelled``, or ``deadline`` where that came first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Finish
    report: Report

    @property
    def usage(self) -> Usage:
        """What the request is counted with."""
        return Usage(self.report.tokens, self.report.cached, len(self.token_ids))


@dataclass(frozen=True)
class Token:
    """One generated token of a stream. ``text`` is the piece of text that it completes, which may be empty.

    What may be the beginning of a stop string is held back until a later token tells. What is held back at the
    answer's end, as a character that the last token leaves unfinished is, stands in :attr:`Answer.text` alone.
    """

    token_id: int
    text: str


@dataclass(frozen=True, eq=False)
class Prefill:
    """The state after a prompt: ``logits`` ``[V]`` float32 of its last position, the canvas, the report."""

    logits: torch.Tensor
    canvas: Canvas
    report: Report = field(repr=False)


def as_token_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    """Return ``token_ids`` as a tuple of ints; an empty tuple is allowed.

    Raises:
        InvalidPrompt: something among them is no integer.
    """
    if not isinstance(token_ids, Iterable):
        raise InvalidPrompt("token ids", token_ids, "an iterable of integers")
    ids = tuple(token_ids)
    for value in ids:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidPrompt("token id", value, "integers")
    return tuple(index(value) for value in ids)

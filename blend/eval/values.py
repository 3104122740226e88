"""What an evaluation finds, as values: records of single answers, rows of a table, the whole document.

The document is what ``results.json`` holds; :mod:`blend.eval.results` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from blend.decoding import decode, encode
from blend.errors import InvalidInput
from blend.eval.stats import Estimate
from blend.versions import Environment

VERSION = 1
"""Version of the document; a newer one is refused."""

Kind = Literal["run", "sweep", "robustness", "perf"]
Level: TypeAlias = str | int | float | None
PromptKey: TypeAlias = tuple[str, str, Level, int]
"""What tells one prompt from another: question, condition, level and order."""
State = Literal["mandatory", "cached", "chosen"]


@dataclass(frozen=True)
class Record:
    """One method's answer to one prompt.

    Args:
        question: the question's id.
        method, ratio: what prefilled the prompt; the ratio is ``None`` for methods that select nothing.
        answer, gold: the greedy answer, and those that are accepted.
        metrics: values by name, as :data:`blend.eval.metrics.METRICS` describes them.
        requested, selected, charged: shares of the cached tokens.
        tokens, cached: of the prompt, and those whose KV was loaded.
        mode: the method that ran in the end, which ``auto`` chooses.
        timings: milliseconds of ``lookup``, ``fetch``, ``rotate``, ``select``, ``recompute``, ``first_token``.
        ttft_ms: from the request to its first token, fetch included.
        condition, level: what was varied and to which value; empty and ``None`` where nothing was.
        order: which order of the same passages this is.
        warnings: what the report warned of.
    """

    question: str
    method: str
    ratio: float | None
    answer: str
    gold: tuple[str, ...]
    metrics: Mapping[str, float]
    requested: float
    selected: float
    charged: float
    tokens: int
    cached: int
    mode: str
    timings: Mapping[str, float]
    ttft_ms: float
    condition: str = ""
    level: Level = None
    order: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, Level, int, str, float | None]:
        """What is the same of no two records of one document."""
        return (self.question, self.condition, self.level, self.order, self.method, self.ratio)


@dataclass(frozen=True)
class Against:
    """A row's difference (row − baseline) in one metric over the same questions.

    ``p`` is two-sided, ``p_holm`` corrected for all the tests of the table. ``noise`` says that it may be chance: its
    interval holds 0, ``p_holm`` is above 0.05, or there are too few questions.
    """

    baseline: str
    difference: Estimate
    p: float
    p_holm: float
    noise: bool


@dataclass(frozen=True)
class Row:
    """One method at one ratio over all questions: means with intervals, costs, and differences.

    ``metrics`` also holds ``recovery_NAME``, the share of what plain reuse loses in NAME that the method wins back,
    where reuse loses more than noise. ``non_inferior`` says of each metric with a declared margin whether the row is
    shown to be worse than full prefill by no more than that.
    """

    method: str
    ratio: float | None
    questions: int
    metrics: Mapping[str, Estimate]
    charged: float
    selected: float
    ttft_ms: Mapping[str, float]
    timings: Mapping[str, float]
    condition: str = ""
    level: Level = None
    against: Mapping[str, Against] = field(default_factory=dict)
    non_inferior: Mapping[str, bool] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, Level, str, float | None]:
        """What is the same of no two rows of one document."""
        return (self.condition, self.level, self.method, self.ratio)


@dataclass(frozen=True)
class Heatmap:
    """The tokens of one prompt as one method treated them.

    ``tokens`` as text; for each its state and its score (``None`` where it had none); ``chunks`` are ``(start, end)``,
    end exclusive.
    """

    question: str
    method: str
    ratio: float | None
    tokens: tuple[str, ...]
    state: tuple[State, ...]
    scores: tuple[float | None, ...]
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PerfPoint:
    """One measured point of an experiment; times in milliseconds, throughput in requests a second.

    ``x`` is what the experiment varies; ``detail`` holds what this experiment alone has.
    """

    experiment: Literal["length", "tier", "hits", "concurrency", "stream"]
    x: float | str
    method: str
    ratio: float | None
    ttft_p50: float
    ttft_p95: float
    throughput: float | None
    requests: int
    timings: Mapping[str, float]
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Perf:
    """All points, and where blending begins to pay against an exact prefix cache."""

    points: tuple[PerfPoint, ...]
    break_even: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Identity:
    """What two results must share to be compared.

    ``model`` is the engine's fingerprint, ``name`` what the model was asked for by, ``dataset`` the digest of the
    questions, ``prompts`` the SHA-256 over all prompts' token ids.
    """

    model: str
    name: str
    dtype: str
    dataset: str
    prompts: str


@dataclass(frozen=True)
class Results:
    """The whole document. ``dropped`` counts by reason the questions that could not be measured."""

    kind: Kind
    command: str
    settings: Mapping[str, object]
    environment: Environment
    identity: Identity
    questions: int
    dropped: Mapping[str, int]
    seed: int
    rows: tuple[Row, ...]
    records: tuple[Record, ...]
    heatmap: Heatmap | None = None
    perf: Perf | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the document as JSON has it, its version included."""
        return {"version": VERSION, **encode(self)}

    @classmethod
    def from_dict(cls, raw: object, where: str) -> Results:
        """Return the document that :meth:`as_dict` made; ``where`` names its origin in errors.

        Raises:
            InvalidInput: it is no such document, or one of a newer version.
        """
        if not isinstance(raw, dict) or type(raw.get("version")) is not int:
            raise InvalidInput(where, "no version", "results of blend-eval")
        if raw["version"] != VERSION:
            newer = "; a newer blend wrote this file" if raw["version"] > VERSION else ""
            raise InvalidInput(f"{where}: version", raw["version"], f"version {VERSION}{newer}")
        return decode(cls, {name: value for name, value in raw.items() if name != "version"}, where)

"""The metrics by name: what each says, which way it points, and the scores of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from blend.errors import InvalidInput
from blend.eval.metrics import text
from blend.names import unknown

MODULES = Path(__file__).parent / "modules"
"""Where the ``evaluate`` modules lie, one directory a text metric."""


@dataclass(frozen=True)
class Metric:
    """What a metric is called and means. ``unit`` is empty for shares from 0 to 1."""

    name: str
    title: str
    better: Literal["higher", "lower"]
    unit: str
    description: str


_TEXT: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {
        "f1": text.squad_f1,
        "em": text.squad_em,
        "token_f1": text.token_f1,
        "rouge_l": text.rouge_l,
        "contains": text.contains,
    }
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric(
                "f1",
                "SQuAD F1",
                "higher",
                "",
                "F1 of the words that answer and reference share, in SQuAD's normal form; the best reference counts.",
            ),
            Metric(
                "em",
                "SQuAD exact match",
                "higher",
                "",
                "1 where the answer in SQuAD's normal form is a reference, else 0.",
            ),
            Metric(
                "token_f1",
                "CacheBlend token F1",
                "higher",
                "",
                "F1 of the tokens that the answer's first line and a reference share, as CacheBlend's released code "
                "counts it, its shortening to Yes and No included; the best reference counts.",
            ),
            Metric(
                "rouge_l",
                "Rouge-L",
                "higher",
                "",
                "F-measure of the longest common subsequence of words, without stemming; the best reference counts.",
            ),
            Metric(
                "contains",
                "Answer contained",
                "higher",
                "",
                "1 where the words of a reference stand in the answer, both in SQuAD's normal form, else 0.",
            ),
            Metric(
                "first_kl",
                "First-token KL",
                "lower",
                "nats",
                "KL(full prefill ‖ method) of the answer's first token.",
            ),
            Metric(
                "answer_kl",
                "Answer KL",
                "lower",
                "nats",
                "KL(full prefill ‖ method), mean over the tokens of full prefill's greedy answer (teacher-forced).",
            ),
            Metric(
                "top1",
                "Top-1 agreement",
                "higher",
                "",
                "Share of the tokens of full prefill's greedy answer at which both rank the same token first.",
            ),
            Metric(
                "same_answer",
                "Same answers",
                "higher",
                "",
                "1 where the method's own greedy answer is full prefill's, token for token, else 0.",
            ),
            Metric(
                "attention_error",
                "Attention output error",
                "lower",
                "",
                "RMS of the difference between the question's attention outputs and full prefill's, over the RMS of "
                "full prefill's; mean over the layers.",
            ),
        )
    }
)
"""Every metric by name: first those of an answer's text, then those against full prefill of the same prompt."""


def module_path(name: str) -> Path:
    """Return the directory of a text metric's module: ``evaluate.load(str(module_path("f1")))``.

    Raises:
        InvalidInput: no text metric of that name; the message has the nearest.
    """
    _function(name)
    return MODULES / name


def text_scores(
    answer: str, references: Sequence[str], names: Sequence[str], *, tokenizer: text.Tokenizer = text.words
) -> dict[str, float]:
    """Return an answer's score by metric, 0 to 1 each: that of the reference it fits best.

    Args:
        answer: what was answered, as text; may be empty.
        references: the accepted answers, one or more.
        names: text metrics.
        tokenizer: what ``token_f1`` counts; the words between white space as long as none is given.

    Raises:
        InvalidInput: an unknown name (the message has the nearest), no references, or a package that is missing.
    """
    if not isinstance(answer, str):
        raise InvalidInput("answer", answer, "a text")
    accepted = () if isinstance(references, (str, bytes)) else tuple(references)
    if not accepted or not all(isinstance(reference, str) for reference in accepted):
        raise InvalidInput("references", references, "a list with one answer or more, each a text")
    scores = {}
    for name in names:
        score = _function(name)
        if name == "token_f1":
            scores[name] = max(text.token_f1(answer, reference, tokenizer) for reference in accepted)
        else:
            scores[name] = max(score(answer, reference) for reference in accepted)
    return scores


def _function(name: str) -> Callable[[str, str], float]:
    if name not in _TEXT:
        raise unknown("text metric", name, _TEXT)
    return _TEXT[name]

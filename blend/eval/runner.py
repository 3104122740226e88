"""One question, every method: full prefill first, then each of the others held against it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval import methods
from blend.eval.datasets import Example
from blend.eval.fidelity import FullPrefill, closeness, full_prefill
from blend.eval.metrics import METRICS, text_scores
from blend.eval.plan import FULL, Planned, conditioned
from blend.eval.prompts import chunks_of
from blend.eval.values import Level, Record
from blend.types import Chunk, Prefill, Prompt, Report, Text

NAMESPACE = "evaluation"

TIMINGS = ("lookup", "fetch", "rotate", "select", "recompute", "first_token")
"""What a record's timings hold, in milliseconds."""

_SELF = {"first_kl": 0.0, "answer_kl": 0.0, "top1": 1.0, "same_answer": 1.0, "attention_error": 0.0}
"""What full prefill is against itself."""

CLOSENESS = tuple(_SELF)
"""Metrics against full prefill of the same prompt; the others are of an answer's text."""


def measure(
    engine: Engine,
    example: Example,
    prompt: Prompt,
    planned: Sequence[Planned],
    *,
    max_new_tokens: int,
    metrics: Collection[str] = tuple(METRICS),
    namespace: str = NAMESPACE,
    condition: str = "",
    level: Level = None,
    order: int = 0,
    capped: bool = False,
    related: Mapping[Chunk, Sequence[Chunk]] | None = None,
) -> Iterator[Record]:
    """Measure one prompt; yields a record a method as soon as it is there, in the order given.

    The prompt's chunks are encoded first, so that every method finds them in memory. Each method prefills once: its
    time to first token, its answer and its distance to full prefill all come of that one prefill. Full prefill runs
    whether it is among ``planned`` or not, unless nothing is.

    Args:
        example: whose answers count as right.
        prompt: of the example; ends with the question.
        planned: methods with their ratios.
        max_new_tokens: most tokens of an answer.
        metrics: which are wanted.
        condition, level, order: what the records say was varied.
        capped: whether ratios are caps on the charge, probes included.
        related: the chunks that a chunk's conditioned variant is encoded behind; others have no such variant, and run
            as they are.

    Raises:
        InvalidInput: a prompt without a question behind its chunks.
        BlendError: what the engine raises.
    """
    if not planned:
        return
    question = prompt.segments[-1]
    if not isinstance(question, Text):
        raise InvalidInput("prompt", "a chunk at its end", "a question behind the last chunk")
    encode(engine, prompt, namespace, related if conditioned(planned) else None)
    full: FullPrefill | None = None

    def run(wanted: Planned) -> Prefill:
        known = None if full is None else methods.Reference(full.prefill, full.forced)
        return methods.prefill(
            engine,
            wanted.method,
            wanted.ratio,
            prompt,
            namespace=namespace,
            reserve=max_new_tokens,
            capped=capped,
            reference=known,
        )

    attention = "attention_error" in metrics
    full = full_prefill(engine, run(FULL), question.token_ids, max_new_tokens, attention=attention)
    for wanted in planned:
        if wanted == FULL:
            prefill, answer, close = full.prefill, full.answer, dict(_SELF)
        else:
            prefill = run(wanted)
            answer = engine.greedy(prefill, max_new_tokens)
            close = closeness(engine, prefill, answer, full)
        text = engine.tokenizer.decode(answer)
        found = {name: value for name, value in close.items() if name in metrics}
        wording = [name for name in metrics if name not in CLOSENESS]
        found |= text_scores(text, example.answers, wording, tokenizer=engine.tokenizer.encode)
        made = recorded(example, wanted.method, wanted.ratio, text, found, prefill.report)
        yield replace(made, condition=condition, level=level, order=order)


def encode(
    engine: Engine, prompt: Prompt, namespace: str, related: Mapping[Chunk, Sequence[Chunk]] | None = None
) -> None:
    """Encode a prompt's chunks, those that have ``related`` ones behind these as well."""
    chunks = chunks_of(prompt)
    engine.precompute(chunks, namespace=namespace)
    conditioned = [chunk for chunk in chunks if related and related.get(chunk)]
    if related and conditioned:
        engine.precompute(conditioned, behind=[related[chunk] for chunk in conditioned], namespace=namespace)


def recorded(
    example: Example, method: str, ratio: float | None, answer: str, metrics: Mapping[str, float], report: Report
) -> Record:
    """Return what is kept of one answer: the method's own name and ratio, its metrics, and what its report says.

    Chunks that should have been in memory and were not are one of its warnings.
    """
    return Record(
        question=example.id,
        method=method,
        ratio=ratio,
        answer=answer,
        gold=example.answers,
        metrics=metrics,
        requested=report.requested_ratio,
        selected=report.selected_ratio,
        charged=report.charged_ratio,
        tokens=report.tokens,
        cached=report.cached,
        mode=report.mode,
        timings={name: getattr(report.timings, name) for name in TIMINGS},
        ttft_ms=report.timings.ttft,
        warnings=_warnings(report),
    )


def _warnings(report: Report) -> tuple[str, ...]:
    """Return the report's warnings, and one for chunks that should have been in memory and were not."""
    return (*report.warnings, f"{count} chunks were not in the store") if (count := lost(report)) else report.warnings


def lost(report: Report) -> int:
    """Return how many chunks should have been in the store and were not, so that they were computed."""
    return sum(chunk.outcome in ("miss", "failed") for chunk in report.chunks)

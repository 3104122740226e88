"""How close a method stays to full prefill of the same prompt: same weights, same dtype, same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blend.config import RagConfig
from blend.engine import Engine
from blend.eval.datasets import Example
from blend.eval.metrics import kl_rows, top1_rows
from blend.rag.chunking import render_chunk
from blend.rag.prompt import PromptBuilder
from blend.types import Chunk, Plan, Prompt, Report


@dataclass(frozen=True)
class Fidelity:
    """One method on one prompt.

    ``first_kl`` is KL(full ‖ method) of the first token, ``answer_kl`` its mean along full prefill's own greedy
    answer (teacher-forced), both in nats; ``top1`` the share of that answer's tokens that the method ranks first.
    """

    example: str
    plan: Plan
    first_kl: float
    answer_kl: float
    top1: float
    report: Report


def build_prompt(engine: Engine, example: Example, rag: RagConfig | None = None) -> Prompt:
    """Return the prompt of an example: every passage one chunk, whatever its length."""
    rag = rag or RagConfig()
    builder = PromptBuilder(engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)
    chunks = [Chunk(engine.tokenize(render_chunk(p.title, p.text))) for p in example.passages]
    return builder.build(chunks, example.question)


def measure(
    engine: Engine, example: Example, plans: Sequence[Plan], *, max_new_tokens: int = 16, namespace: str = "evaluation"
) -> Iterator[Fidelity]:
    """Compare plans with full prefill on one example; yields one result a plan. Chunks are precomputed first."""
    prompt = build_prompt(engine, example)
    chunks = [s for s in prompt.segments if isinstance(s, Chunk)]
    engine.precompute(chunks, namespace=namespace)
    reference = engine.prefill(prompt, Plan("full"), namespace=namespace, reserve=max_new_tokens)
    ids = engine.greedy(reference, max_new_tokens) or (min(engine.tokenizer.eos_ids),)
    full = engine.continuation(reference, ids)
    for plan in plans:
        blended = engine.prefill(prompt, plan, namespace=namespace, reserve=max_new_tokens)
        got = engine.continuation(blended, ids)
        kl = kl_rows(full, got)
        agree = top1_rows(full, got).float().mean()
        yield Fidelity(example.id, plan, float(kl[0]), float(kl.mean()), float(agree), blended.report)

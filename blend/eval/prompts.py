"""Prompts of a data set: each passage one chunk, whatever its length; what the model has no room for is counted."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blend.config import RagConfig
from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval.datasets import Example
from blend.rag.chunking import render_chunk
from blend.rag.prompt import PromptBuilder
from blend.types import Chunk, Prompt

TOO_LONG = "longer than the model"
"""Why a question is dropped whose prompt and answer exceed the model's context."""


@dataclass(frozen=True)
class Prepared:
    """Examples with their prompts, how many were dropped by reason, and the digest of all prompts that are left."""

    questions: tuple[tuple[Example, Prompt], ...]
    dropped: Mapping[str, int]
    digest: str


def build_prompt(engine: Engine, example: Example, rag: RagConfig | None = None) -> Prompt:
    """Return the prompt of an example, its passages in the example's order."""
    rag = rag or RagConfig()
    builder = PromptBuilder(engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)
    chunks = [Chunk(engine.tokenize(render_chunk(p.title, p.text))) for p in example.passages]
    return builder.build(chunks, example.question)


def prepare(engine: Engine, examples: Iterable[Example], *, max_new_tokens: int) -> Prepared:
    """Build every prompt and drop, never cut, those that the model has no room for with their answer.

    Raises:
        InvalidInput: none is left.
    """
    most = engine.decoder.max_positions - max_new_tokens
    kept, dropped = [], 0
    for example in examples:
        prompt = build_prompt(engine, example)
        if len(prompt) <= most:
            kept.append((example, prompt))
        else:
            dropped += 1
    if not kept:
        shown = f"{dropped} questions, each longer than {most} tokens with room for its answer"
        raise InvalidInput("dataset", shown, "at least one question that fits the model")
    return Prepared(tuple(kept), {TOO_LONG: dropped} if dropped else {}, digest([prompt for _, prompt in kept]))


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256, in hex, over all prompts' token ids in order."""
    total = hashlib.sha256()
    for prompt in prompts:
        ids = prompt.token_ids
        total.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
    return total.hexdigest()

"""Prompts of a data set: each passage one chunk, whatever its length; what the model has no room for is counted."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from blend.config import RagConfig
from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval.datasets import Example
from blend.eval.values import Level, PromptKey
from blend.rag.chunking import render_chunk
from blend.rag.prompt import PromptBuilder
from blend.types import Chunk, Prompt

TOO_LONG = "longer than the model"
"""Why a question is dropped whose prompt and answer exceed the model's context."""


@dataclass(frozen=True)
class Asked:
    """One prompt of an example; ``condition``, ``level`` and ``order`` say what was varied, as in a record."""

    example: Example
    prompt: Prompt
    condition: str = ""
    level: Level = None
    order: int = 0

    @property
    def key(self) -> PromptKey:
        """What is the same of no two prompts of a data set."""
        return (self.example.id, self.condition, self.level, self.order)


Vary: TypeAlias = "Callable[[Engine, Example, Counter[str]], Iterable[Asked]]"
"""Makes the prompts of an example; what it cannot make it counts by reason."""


@dataclass(frozen=True)
class Prepared:
    """All prompts, how many questions were dropped by reason, and the digest of the prompts that are left."""

    asked: tuple[Asked, ...]
    dropped: Mapping[str, int]
    digest: str


def layout(engine: Engine, rag: RagConfig | None = None) -> PromptBuilder:
    """Return what puts passages and questions together as the service does."""
    rag = rag or RagConfig()
    return PromptBuilder(engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)


def build_prompt(engine: Engine, example: Example, rag: RagConfig | None = None) -> Prompt:
    """Return the prompt of an example, its passages in the example's order."""
    chunks = [Chunk(engine.tokenize(render_chunk(p.title, p.text))) for p in example.passages]
    return layout(engine, rag).build(chunks, example.question)


def chunks_of(prompt: Prompt) -> list[Chunk]:
    """Return the prompt's chunks, in order."""
    return [segment for segment in prompt.segments if isinstance(segment, Chunk)]


def as_it_is(engine: Engine, example: Example, dropped: Counter[str]) -> Iterator[Asked]:
    """Yield the one prompt of an example of which nothing is varied."""
    yield Asked(example, build_prompt(engine, example))


def prepare(engine: Engine, examples: Iterable[Example], *, max_new_tokens: int, vary: Vary = as_it_is) -> Prepared:
    """Build every prompt and drop, never cut, examples with one that the model has no room for with its answer.

    Raises:
        InvalidInput: none is left.
    """
    most = engine.decoder.max_positions - max_new_tokens
    kept: list[Asked] = []
    dropped: Counter[str] = Counter()
    for example in examples:
        asked = list(vary(engine, example, dropped))
        if all(len(one.prompt) <= most for one in asked):
            kept += asked
        else:
            dropped[TOO_LONG] += 1
    if not kept:
        shown = "; ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise InvalidInput("dataset", shown, f"at least one question of {most} tokens or fewer that can be used")
    return Prepared(tuple(kept), dict(dropped), digest([one.prompt for one in kept]))


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256, in hex, over all prompts' token ids in order."""
    total = hashlib.sha256()
    for prompt in prompts:
        ids = prompt.token_ids
        total.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
    return total.hexdigest()

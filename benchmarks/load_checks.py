"""Whether answers under load are those that the same questions get alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from load_clients import Ask, Seen

from blend import Chunk, Engine, EngineConfig, Plan, RagConfig, StoreConfig
from blend.config import GiB
from blend.rag.chunking import render_chunk
from blend.rag.prompt import PromptBuilder
from blend_server.proto.blend.v1 import blend_pb2 as pb

NEAR = 1e-3
"""Tokens whose log-probabilities differ by less, in nats, are as likely as one another: rounding may take either."""

CODE = re.compile(r"QUESTION-\d{5}-\d{3}")


def foreign(seen: Seen, ask: Ask) -> list[str]:
    """Codes in the answer that belong to other questions."""
    return [found for found in CODE.findall(seen.final().text) if found not in ask.question]


def differing(seen: Sequence[Seen], alone: Mapping[int, Seen]) -> dict[int, list[tuple[int, ...]]]:
    """Answers that are not, token by token, those given alone, by what was asked."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for one in seen:
        tokens = tuple(one.final().token_ids)
        if tokens != tuple(alone[one.ask].final().token_ids) and tokens not in found.setdefault(one.ask, []):
            found[one.ask].append(tokens)
    return {ask: answers for ask, answers in found.items() if answers}


class Referee:
    """Says whether two answers part at a near-tie, by an engine of its own."""

    def __init__(self, model: str, directory: Path) -> None:
        store = StoreConfig(host_bytes=1 * GiB, disk_bytes=0, directory=directory)
        self._engine = Engine(EngineConfig(model, dtype="float32", store=store))
        rag = RagConfig()
        self._prompts = PromptBuilder(self._engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)

    def near(self, ask: Ask, alone: Seen, answer: Sequence[int]) -> bool:
        """Whether the first token that differs is as likely as the one that the answer given alone has there."""
        wanted = tuple(alone.final().token_ids)
        at = next(n for n, (a, b) in enumerate(zip_longest(wanted, answer)) if a != b)
        passages = pb.Passages.FromString(alone.passages).passages
        chunks = [Chunk(self._engine.tokenize(render_chunk(p.title, p.text))) for p in passages]
        self._engine.precompute(chunks)
        prompt = self._prompts.build(chunks, ask.question)
        plan = Plan(ask.method, None if ask.method in ("full", "reuse", "prefix") else ask.ratio)
        scores = self._engine.score(prompt, (*wanted[:at], 0), plan)[at]
        first, second = (self._score(scores, of[at : at + 1]) for of in (wanted, answer))
        return abs(first - second) < NEAR

    def _score(self, scores: torch.Tensor, token: Sequence[int]) -> float:
        """What a token is given, or, where an answer has none any more, the likeliest end token."""
        return float(scores[list(token or self._engine.tokenizer.eos_ids)].max())

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

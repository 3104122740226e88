"""Invariant 1: at ratio 1 a blended prefill is full prefill; with the same left context, reuse is too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.types import Answer
from tests import tiny

SELECTING = ("random", "head", "deviation", "query")


def stock_logits(engine: Engine, prompt: Prompt) -> torch.Tensor:
    """Logits [V] of stock transformers with eager attention, on a model of its own."""
    model = AutoModelForCausalLM.from_pretrained(engine.config.model, attn_implementation="eager").eval().float()
    with torch.inference_mode():
        return model(torch.tensor([prompt.token_ids])).logits[0, -1]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """The bound of the invariant."""
    assert (got - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


def near_tie(logits: torch.Tensor) -> bool:
    """Whether the two best tokens are too close to call."""
    first, second = logits.topk(2).values.tolist()
    return first - second <= 2e-3


def assert_same_greedy(engine: Engine, prompt: Prompt, got: Answer, want: Answer) -> None:
    """The same tokens, up to the first place where full prefill itself is undecided."""
    scores = engine.score(prompt, want.token_ids, Plan("full"))
    for place, (one, other) in enumerate(zip(got.token_ids, want.token_ids, strict=False)):
        if one != other:
            assert near_tie(scores[place]), f"token {place} differs although it is no near-tie"
            return
    assert len(got.token_ids) == len(want.token_ids)


@pytest.mark.parametrize("method", ["full", *SELECTING])
def test_logits_and_greedy_tokens_are_those_of_full_prefill(engine: Engine, method: str) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    plan = Plan(method) if method == "full" else Plan(method, ratio=1.0)
    result = engine.prefill(prompt, plan)
    assert_close(result.logits, stock_logits(engine, prompt))
    assert result.report.charged_ratio == 1.0
    want = engine.generate(prompt, max_new_tokens=8, plan=Plan("full"))
    assert_same_greedy(engine, prompt, engine.generate(prompt, max_new_tokens=8, plan=plan), want)


def test_reuse_alone_is_not_full_prefill_which_shows_that_the_bound_can_fail(engine: Engine) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    got = engine.prefill(prompt, Plan("reuse")).logits
    assert (got - stock_logits(engine, prompt)).abs().max() > 1e-2


@pytest.mark.parametrize("method", ["prefix", "reuse", *SELECTING])
def test_reuse_is_exact_where_the_whole_left_context_is_the_sink(engine: Engine, method: str) -> None:
    prompt = Prompt([Text(engine.sink), Chunk(tiny.random_ids(40, 1)), Text(tiny.random_ids(9, 2))])
    engine.precompute(tiny.chunks_of(prompt))
    result = engine.prefill(prompt, Plan(method), positions=True)
    assert [c.outcome for c in result.report.chunks] == ["hit"]
    assert_close(result.logits, stock_logits(engine, prompt))
    assert result.report.charged_ratio == 0.0, "exact tokens need no repair"
    assert set(result.report.recomputed_positions or ()) == {0, *range(41, 50)}


def test_a_prompt_that_ends_with_a_chunk(llama: Engine) -> None:
    prompt = Prompt([Text((1, 7, 8)), Chunk(tiny.random_ids(30, 1)), Chunk(tiny.random_ids(31, 2))])
    llama.precompute(tiny.chunks_of(prompt))
    for method in SELECTING:
        assert_close(llama.prefill(prompt, Plan(method, ratio=1.0)).logits, stock_logits(llama, prompt))


def test_slices_change_nothing(model_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    prompt = tiny.prompt()
    with tiny.engine(model_of("llama"), tmp_path, max_rows=7) as sliced:
        sliced.precompute(tiny.chunks_of(prompt))
        want = stock_logits(sliced, prompt)
        assert_close(sliced.prefill(prompt, Plan("query", ratio=1.0)).logits, want)
        assert_close(sliced.prefill(prompt, Plan("full")).logits, want)


@pytest.mark.parametrize("method", SELECTING)
def test_score_continues_a_blended_prompt_like_full_prefill(llama: Engine, method: str) -> None:
    prompt = tiny.prompt()
    llama.precompute(tiny.chunks_of(prompt))
    continuation = tiny.random_ids(6, 77)
    whole = Prompt([Text(prompt.token_ids + continuation[:5])])
    got = llama.score(prompt, continuation, Plan(method, ratio=1.0))
    assert got.shape == (6, llama.decoder.vocab_size)
    assert_close(got[5], stock_logits(llama, whole).log_softmax(-1))

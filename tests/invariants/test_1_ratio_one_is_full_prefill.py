"""Invariant 1: at ratio 1 a blended prefill is full prefill; with the same left context, reuse is too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.model.decoder import Rows
from blend.recompute import correct
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


@pytest.mark.parametrize("method", SELECTING)
def test_below_ratio_one_probes_leave_no_trace(engine: Engine, method: str) -> None:
    """What a blended prefill ends with is one pass of its rows over freshly loaded chunks, whatever was probed."""
    prompt = tiny.prompt(chunks=4)
    chunks = tiny.chunks_of(prompt)
    engine.precompute(c for i, c in enumerate(chunks) if i != 1)
    got = engine.prefill(prompt, Plan(method, ratio=0.2), positions=True)
    held = {p for a, b, s in prompt.spans() if s in chunks and s != chunks[1] for p in range(a, b)}
    chosen = held & set(got.report.recomputed_positions or ())
    assert len(chosen) == got.report.selected > 0
    canvas = engine.decoder.new_canvas(len(prompt))
    canvas.k.copy_(engine.prefill(prompt, Plan("reuse")).canvas.k)
    canvas.v.copy_(engine.prefill(prompt, Plan("reuse")).canvas.v)
    rows = torch.tensor(sorted(chosen | (set(range(len(prompt))) - held)))
    observer = None
    if method == "query":  # moves the KV of the others by what these rows show
        loaded = tuple((a, b) for a, b, s in prompt.spans() if s in chunks and s != chunks[1])
        cached = torch.tensor([p in held for p in range(len(prompt))])
        start = len(prompt) - len(prompt.segments[-1])
        decoder, fresh = engine.decoder, torch.tensor(sorted(chosen))
        found = correct.correction(decoder.rotations, loaded, cached, fresh, start, 8, decoder.kernels)
        assert found is not None
        observer = found.observer()
    logits = engine.decoder.forward([Rows(canvas, rows, torch.tensor(prompt.token_ids)[rows], observer=observer)])
    assert logits is not None
    assert_close(got.logits, logits[0])
    torch.testing.assert_close(got.canvas.k, canvas.k, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.canvas.v, canvas.v, rtol=1e-4, atol=1e-4)


def test_a_prompt_that_ends_with_a_chunk(llama: Engine) -> None:
    prompt = Prompt([Text((1, 7, 8)), Chunk(tiny.random_ids(30, 1)), Chunk(tiny.random_ids(31, 2))])
    llama.precompute(tiny.chunks_of(prompt))
    for method in SELECTING:
        assert_close(llama.prefill(prompt, Plan(method, ratio=1.0)).logits, stock_logits(llama, prompt))


def test_slices_change_nothing_and_no_pass_is_larger(
    model_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt()
    plans = [Plan("full"), *(Plan(m, ratio=r) for m in SELECTING for r in (0.2, 1.0))]
    with tiny.engine(model_of("llama"), tmp_path / "whole") as whole:
        whole.precompute(tiny.chunks_of(prompt))
        want = [whole.prefill(prompt, plan, positions=True) for plan in plans]
    with tiny.engine(model_of("llama"), tmp_path / "sliced", max_rows=7) as sliced:
        sizes = []
        forward = sliced.decoder.forward
        monkeypatch.setattr(
            sliced.decoder, "forward", lambda batch, **k: sizes.append(sum(map(len, batch))) or forward(batch, **k)
        )
        sliced.precompute(tiny.chunks_of(prompt))
        for plan, expected in zip(plans, want, strict=True):
            got = sliced.prefill(prompt, plan, positions=True)
            assert got.report.recomputed_positions == expected.report.recomputed_positions
            assert_close(got.logits, expected.logits)
        sliced.score(prompt, tiny.random_ids(20, 1), Plan("full"))
        assert max(sizes) == 7


@pytest.mark.parametrize("method", SELECTING)
def test_score_continues_a_blended_prompt_like_full_prefill(llama: Engine, method: str) -> None:
    prompt = tiny.prompt()
    llama.precompute(tiny.chunks_of(prompt))
    continuation = tiny.random_ids(6, 77)
    whole = Prompt([Text(prompt.token_ids + continuation[:5])])
    got = llama.score(prompt, continuation, Plan(method, ratio=1.0))
    assert got.shape == (6, llama.decoder.vocab_size)
    assert_close(got[5], stock_logits(llama, whole).log_softmax(-1))

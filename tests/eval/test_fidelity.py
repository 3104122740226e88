"""Closeness to full prefill: nothing for full prefill itself, something for reuse, and attention outputs that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from blend import Engine, Plan
from blend.errors import InvalidInput, ModelError
from blend.eval.fidelity import attention_error, attention_outputs, closeness, full_prefill
from tests import tiny


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("fidelity")
    with tiny.engine(tiny.save_model(directory / "model", request.param), directory / "store") as made:
        yield made


def test_full_prefill_is_at_no_distance_of_itself_and_reuse_is(engine: Engine) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    question = prompt.segments[-1].token_ids
    full = full_prefill(engine, engine.prefill(prompt, Plan("full"), reserve=6), question, 6, attention=True)
    again = engine.prefill(prompt, Plan("full"), reserve=6)
    same = closeness(engine, again, engine.greedy(again, 6), full)
    assert same == {
        "first_kl": pytest.approx(0, abs=1e-6),
        "answer_kl": pytest.approx(0, abs=1e-6),
        "top1": 1.0,
        "same_answer": 1.0,
        "attention_error": pytest.approx(0, abs=1e-5),
    }
    reused = engine.prefill(prompt, Plan("reuse"), reserve=6)
    far = closeness(engine, reused, engine.greedy(reused, 6), full)
    assert far["first_kl"] > 1e-4 and far["answer_kl"] > 1e-4 and 1e-3 < far["attention_error"] < 2


def test_a_distance_that_is_no_number_is_the_models_fault(engine: Engine) -> None:
    prompt = tiny.prompt()
    question = prompt.segments[-1].token_ids
    prefill = engine.prefill(prompt, Plan("full"), reserve=2)
    full = full_prefill(engine, prefill, question, 2, attention=False)
    broken = replace(full, logs=torch.full_like(full.logs, torch.nan))
    with pytest.raises(ModelError, match="first_kl of full is nan.*float32"):
        closeness(engine, prefill, full.answer, broken)


def test_attention_outputs_are_the_input_of_the_output_projection(engine: Engine) -> None:
    """Against a hook on the projection, in a full prefill."""
    prompt = tiny.prompt()
    question = prompt.segments[-1].token_ids
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
        for name, module in engine.decoder.model.named_modules()
        if name.endswith("o_proj")
    ]
    prefill = engine.prefill(prompt, Plan("full"))
    for hook in hooks:
        hook.remove()
    found = attention_outputs(engine, prefill, question)
    layers, heads, rows, dims = found.shape
    assert (layers, rows) == (engine.decoder.layers, len(question))
    wanted = torch.stack([s[0, -rows:].view(rows, heads, dims).transpose(0, 1) for s in seen])
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_the_error_is_relative_and_a_mean_over_layers() -> None:
    full = torch.tensor([[[[3.0, 4.0]]], [[[0.0, 2.0]]]])
    other = torch.tensor([[[[3.0, 4.0]]], [[[0.0, 1.0]]]])
    assert attention_error(full, other) == pytest.approx((0 + 0.5) / 2)


def test_a_question_is_not_longer_than_its_prompt(engine: Engine) -> None:
    prefill = engine.prefill(tiny.prompt(), Plan("full"))
    for wrong in ((), (5,) * 1000):
        with pytest.raises(InvalidInput, match="question"):
            attention_outputs(engine, prefill, wrong)

"""The memory of a prefill: what is planned, held against what torch allocates while one runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.model.decoder import Decoder
from blend.recompute.passes import everything
from blend.recompute.scratch import Scratch, Shapes
from tests import tiny
from tests.models import SUPPORTED, build

ROWS = 256
"""Rows of a slice: prompts here are several slices long."""

PLANS = (Plan("full"), Plan("reuse"), Plan("query", 0.15), Plan("deviation", 0.3))

SHAPE: dict[str, Any] = dict(
    hidden_size=384,
    intermediate_size=768,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
)


def peak(call: Callable[[], object], engine: Engine | None = None) -> int:
    """Most bytes at a time of what torch allocated on the CPU within ``call``, which canvases are not part of.

    Of one thread: this one, or an engine's own.
    """
    gc.collect()  # what goes within the call, but was there before, would count as memory given back
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    there = engine._scheduler.call if engine is not None else lambda function: function()
    there(watched.start)  # it watches the thread that it begins in
    call()
    there(watched.stop)
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.fixture(scope="module", params=["float32", "bfloat16", "gemma2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp(request.param)
    gemma = request.param == "gemma2"
    model = tiny.save_model(directory / "model", "gemma2" if gemma else "llama", **SHAPE)
    dtype = "float32" if gemma else request.param
    with tiny.engine(model, directory / "store", dtype=dtype, max_rows=ROWS) as made:
        yield made


def prompt(tokens: int, *, text: bool = False) -> Prompt:
    """Four chunks of a quarter of the tokens each; with ``text`` two of them are plain text instead."""
    made = tiny.prompt(4, length=tokens // 4, question=40)
    if not text:
        return made
    header, first, *others, last, question = made.segments
    assert isinstance(last, Chunk)
    return Prompt([header, first, *(Text(part.token_ids) for part in others), last, question])


def peaks(engine: Engine, tokens: int) -> dict[str, int]:
    """What prefills of about so many tokens take beside the canvas, by how they are run."""
    whole, text = prompt(tokens), prompt(tokens, text=True)
    engine.precompute(tiny.chunks_of(whole))
    found = {plan.method: peak(partial(engine.prefill, whole, plan), engine) for plan in PLANS}
    engine.forget(tiny.chunks_of(text)[-1:])
    found["query, one chunk missing"] = peak(lambda: engine.prefill(text, Plan("query", 0.15)), engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [500, 1000, 3000])
def test_no_prefill_takes_more_than_was_planned_and_the_largest_not_much_less(engine: Engine, tokens: int) -> None:
    found = peaks(engine, tokens)
    need = Scratch(Shapes.of(engine.decoder), ROWS).need(len(prompt(tokens)))
    planned = need.total - need.canvas
    assert max(found.values()) <= planned <= 3 * max(found.values())


@pytest.mark.slow
def test_the_memory_of_a_full_prefill_in_slices_does_not_follow_the_prompt(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model", **SHAPE), tmp_path / "store", max_rows=ROWS) as engine:
        prompts = prompt(1000), prompt(4000)
        short, long = (peak(partial(engine.prefill, made, Plan("full")), engine) for made in prompts)
        canvas = engine.stats().kv_bytes_per_token * (len(prompts[1]) - len(prompts[0]))
        assert long - short < 0.01 * canvas


@pytest.mark.slow
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_slice_of_any_family_takes_what_was_planned(family: str) -> None:
    decoder = Decoder(build(family))
    tokens = torch.arange(600) % 100 + 3
    canvas = decoder.new_canvas(len(tokens))
    need = Scratch(Shapes.of(decoder), len(tokens)).need(len(tokens))
    taken = peak(lambda: everything(decoder, canvas, tokens, len(tokens)))
    assert taken <= need.total - need.canvas
    assert need.activations <= 2 * taken


LLAMA_8B = Shapes(
    layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336, vocabulary=128256,
    dtype=torch.bfloat16, backend="triton", staged=True, gpu=True, processors=132,
)  # fmt: skip
"""On a GPU with 132 multiprocessors."""

ON_A_CPU = replace(LLAMA_8B, backend="torch", staged=False, gpu=False, processors=1)


@pytest.mark.parametrize("shapes", [LLAMA_8B, ON_A_CPU])
def test_beside_the_canvas_little_follows_the_prompt(shapes: Shapes) -> None:
    scratch = Scratch(shapes, 8192)
    short, long = scratch.need(16_384), scratch.need(131_072)
    assert long.canvas == 8 * short.canvas == 131_072 * 131_072
    assert long.activations == short.activations < 2**31
    assert long.total - short.total < 1.15 * (long.canvas - short.canvas)


def test_rows_that_are_not_computed_take_nothing() -> None:
    scratch = Scratch(LLAMA_8B, 8192)
    few, all_ = scratch.need(8192, 1024), scratch.need(8192)
    assert few.activations * 8 == all_.activations
    assert few.canvas == all_.canvas
    assert scratch.need(65_536, 8192).activations == scratch.need(65_536).activations

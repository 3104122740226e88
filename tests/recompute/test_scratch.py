"""The memory of a prefill: what is planned, held against what torch allocates while one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from blend import Engine, Plan, Prompt
from blend.recompute.scratch import Scratch, Shapes
from tests import tiny

ROWS = 256
"""Rows of a slice: prompts here are several slices long."""

PLANS = (Plan("full"), Plan("reuse"), Plan("query", 0.15), Plan("deviation", 0.3))
LENGTHS = (1000, 2000, 4000)

SHAPE = dict(
    hidden_size=384,
    intermediate_size=768,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
)


def peak(call: Callable[[], object]) -> int:
    """Most bytes that torch held at a time of what it allocated on the CPU within ``call``. Canvases are not torch's."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
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


def prompt(engine: Engine, tokens: int) -> Prompt:
    made = tiny.prompt(4, length=tokens // 4, question=40)
    engine.precompute(tiny.chunks_of(made))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.method)
def test_a_prefill_takes_what_was_planned_and_not_much_less(engine: Engine, plan: Plan) -> None:
    scratch = Scratch(Shapes.of(engine.decoder), ROWS)
    taken = []
    for tokens in LENGTHS:
        made = prompt(engine, tokens)
        need = scratch.need(len(made))
        taken.append(peak(lambda made=made: engine.prefill(made, plan)))
        planned = need.total - need.canvas
        print(plan.method, tokens, taken[-1], planned, need.parts())
        assert taken[-1] <= planned

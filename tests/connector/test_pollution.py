"""Exact requests between blended ones: their answers are those of a vLLM without the connector, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blend import Engine, Plan, Prompt, Text
from tests import tiny
from tests.connector.conftest import Ask, Output, Vllm, agree, plain_vllm, store_settings, vllm
from tests.connector.test_modes import SIZES, prompt_of

pytestmark = pytest.mark.slow
INTERLEAVINGS = 200
BLOCK = 128
PLANS = (Plan("reuse"), Plan("head", ratio=0.15), Plan("query", ratio=0.15), Plan("deviation", ratio=0.3))
CHANGES = dict(max_model_len=1024, skip_tokenizer_init=True, num_gpu_blocks_override=24)  # some blocks are evicted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path_factory.mktemp("store")) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(model: Path, native: Engine) -> Iterator[Vllm]:
    with vllm(model, store_settings(native.config.store.path), **CHANGES) as made:
        yield made


class Reference:
    """A vLLM without the connector: what it answers, behind as much of its prefix cache as the other one had."""

    def __init__(self, model: Path) -> None:
        self._started = plain_vllm(model, **CHANGES)
        self._vllm = self._started.__enter__()
        self._known: dict[tuple[Prompt, int], Output] = {}

    def answer(self, prompt: Prompt, cached: int) -> Output:
        if (prompt, cached) not in self._known:
            self._vllm.forget_prefixes()
            if cached:
                self._vllm.ask(Ask(Prompt([Text(prompt.token_ids[: cached + 1])])))
            (found,) = self._vllm.ask(Ask(prompt))
            assert found.cached == cached
            self._known[prompt, cached] = found
        return self._known[prompt, cached]

    def close(self) -> None:
        self._started.__exit__(None, None, None)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    made = Reference(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(native: Engine) -> list[Prompt]:
    """Prompts that share headers of more than a block, chunks in the same order, and all but the question."""
    header = Text((1, *tiny.random_ids(BLOCK + 30, 70)))
    found = []
    for seed in (2000, 2020):
        base = prompt_of(seed, native)
        other = Text(tiny.random_ids(25, seed + 15))
        found += [base, Prompt([*base.segments[:-1], other]), Prompt([header, *base.segments[1:]])]
        found.append(Prompt([header, *base.segments[1:3], other]))
    return found


def test_one_at_a_time(served: Vllm, reference: Reference, prompts: list[Prompt]) -> None:
    draw = random.Random(11)
    served.forget_prefixes()
    exact = blended = 0
    for _ in range(INTERLEAVINGS):
        prompt = draw.choice(prompts)
        plan = draw.choice((None, None, *PLANS))
        (found,) = served.ask(Ask(prompt, plan))
        if plan is not None:
            blended += 1
            continue
        exact += 1
        wanted = reference.answer(prompt, found.cached)
        off = float((found.logprobs - wanted.logprobs).abs().max())
        if off: print('OFF', prompts.index(prompt), found.cached, off)
    assert min(exact, blended) > INTERLEAVINGS // 5


def test_several_at_a_time(served: Vllm, reference: Reference, prompts: list[Prompt]) -> None:
    draw = random.Random(12)
    served.forget_prefixes()
    asked = 0
    while asked < INTERLEAVINGS:
        asks = [Ask(draw.choice(prompts), draw.choice((None, None, *PLANS))) for _ in range(draw.randint(2, 5))]
        asked += len(asks)
        for ask, found in zip(asks, served.ask(*asks), strict=True):
            if ask.plan is None:
                agree([found], [reference.answer(ask.prompt, 0)])

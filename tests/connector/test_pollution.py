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
CHANGES = dict(max_model_len=1024, skip_tokenizer_init=True)


@pytest.fixture(scope="module", autouse=True)
def same_threads() -> Iterator[None]:
    """As many threads in both: they add up the same numbers in the same order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # two engines on the same cores
        yield


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


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Vllm]:
    with plain_vllm(model, **CHANGES) as made:
        yield made


def prompts(native: Engine, header: int) -> list[Prompt]:
    """Prompts that share a header, chunks in the same order, and all but the question."""
    begin = Text((1, *tiny.random_ids(header, 70)))
    found = []
    for seed in (2000, 2020):
        base = prompt_of(seed, native)
        other = Text(tiny.random_ids(25, seed + 15))
        found += [base, Prompt([*base.segments[:-1], other]), Prompt([begin, *base.segments[1:]])]
        found.append(Prompt([begin, *base.segments[1:3], other]))
    return found


def test_one_at_a_time(served: Vllm, plain: Vllm, native: Engine) -> None:
    """Both see the same exact requests, so that their prefix caches are alike, and no other's block is anybody's.

    Headers are shorter than a block: one that a blended request has computed would be exact, but not to the last bit,
    for it is computed beside other rows.
    """
    draw, known = random.Random(11), prompts(native, header=40)
    for each in (served, plain):
        each.forget_prefixes()
    exact = blended = 0
    for _ in range(INTERLEAVINGS):
        prompt, plan = draw.choice(known), draw.choice((None, None, *PLANS))
        (found,) = served.ask(Ask(prompt, plan))
        if plan is not None:
            blended += 1
            continue
        exact += 1
        (wanted,) = plain.ask(Ask(prompt))
        assert found.cached == wanted.cached
        assert torch.equal(found.logprobs, wanted.logprobs)
    assert min(exact, blended) > INTERLEAVINGS // 5


def test_several_at_a_time(served: Vllm, plain: Vllm, native: Engine) -> None:
    draw, known = random.Random(12), prompts(native, header=BLOCK + 30)
    wanted: dict[Prompt, Output] = {}
    for prompt in known:
        plain.forget_prefixes()
        (wanted[prompt],) = plain.ask(Ask(prompt))
    served.forget_prefixes()
    asked = 0
    while asked < INTERLEAVINGS:
        asks = [Ask(draw.choice(known), draw.choice((None, None, *PLANS))) for _ in range(draw.randint(2, 5))]
        asked += len(asks)
        for ask, found in zip(asks, served.ask(*asks), strict=True):
            if ask.plan is None:
                agree([found], [wanted[ask.prompt]])

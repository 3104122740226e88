"""A tiny random model in a real vLLM whose heads two ranks share, beside the native engine that holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blend import Chunk, Engine, Plan, Prompt, Text
from tests import tiny
from tests.connector.conftest import Ask, Vllm, agree, kl, store_settings, vllm

pytestmark = pytest.mark.slow
SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=32)  # head sizes that vLLM has
RANKS = 2
TENANT = "default"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path_factory.mktemp("store")) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(model: Path, native: Engine) -> Iterator[Vllm]:
    with two_ranks(model, native.config.store.path) as made:
        yield made


@contextmanager
def two_ranks(model: Path, directory: Path) -> Iterator[Vllm]:
    changes: dict[str, Any] = dict(max_model_len=1024, max_num_batched_tokens=256, skip_tokenizer_init=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each rank wants a NUMA node of its own
        with vllm(model, store_settings(directory), tensor_parallel_size=RANKS, **changes) as made:
            yield made


def prompt_of(seed: int) -> Prompt:
    """480 tokens."""
    chunks = [Chunk(tiny.random_ids(count, seed + count)) for count in (100, 120, 140, 90)]
    return Prompt([Text((1, *tiny.random_ids(9, seed))), *chunks, Text(tiny.random_ids(20, seed + 1))])


def stored(seed: int, served: Vllm, native: Engine) -> Prompt:
    """A prompt whose chunks are stored, for the native engine and on every rank."""
    prompt = prompt_of(seed)
    native.precompute(tiny.chunks_of(prompt))
    assert everybody(served, partial(_encode, chunks=tiny.chunks_of(prompt))) == [4] * RANKS
    return prompt


def everybody(served: Vllm, function: Callable[[Any], Any]) -> list[Any]:
    """Return what ``function`` returns of each rank's half of the connector, in whose process it is called."""
    return list(served.llm.collective_rpc(partial(_with_half, function=function)))


def _with_half(worker: Any, function: Callable[[Any], Any]) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return function(get_kv_transfer_group().worker)


def _encode(half: Any, chunks: list[Chunk]) -> int:
    return sum(half.chunks.encode(chunk, TENANT)[1] for chunk in chunks)


def _forget(half: Any, chunk: Chunk, ranks: tuple[int, ...]) -> None:
    if half.chunks.decoder.shards.rank in ranks:
        half.chunks.forget([half.chunks.key(chunk, TENANT)])


def test_ratio_one_is_this_engines_own_full_prefill(served: Vllm, native: Engine) -> None:
    prompt = stored(100, served, native)
    served.forget_prefixes()
    (full,) = served.ask(Ask(prompt), tokens=4)
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, Plan("random", ratio=1.0)), tokens=4)
    assert found.report is not None
    assert found.report["cached"] == sum(map(len, tiny.chunks_of(prompt))) == found.report["selected"]
    agree([found], [full])


@pytest.mark.parametrize("method", ["head", "deviation", "query"])
def test_the_native_engine_chooses_the_same_rows_and_answers_alike(served: Vllm, native: Engine, method: str) -> None:
    prompt, plan = stored(200, served, native) if method == "head" else prompt_of(200), Plan(method, ratio=0.15)
    theirs = native.prefill(prompt, plan, positions=True)
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, plan))
    assert found.report is not None
    assert found.report["cached"] == theirs.report.cached > 0
    recomputed = theirs.report.recomputed_positions or ()
    assert found.report["recomputed_positions"] == [p for p in recomputed if p < found.report["filled"]]
    assert kl(theirs.logits.log_softmax(-1), found.logprobs[0]) <= 1e-4

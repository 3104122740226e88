"""A tiny random model in a real vLLM whose heads two ranks share, beside the native engine that holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from blend import Chunk, Engine, Plan, Prefill, Prompt, Text
from blend.connector.client import build_prompt
from tests import tiny
from tests.connector.conftest import Ask, Output, Vllm, agree, kl, store_settings, vllm

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=32
)  # head sizes that vLLM has
RANKS = 2
PAUSES = dict(step_share=0.05)
"""So little of a step that a request is stopped many times where others are under way."""
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
        with vllm(model, store_settings(directory), PAUSES, tensor_parallel_size=RANKS, **changes) as made:
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


def until(done: Callable[[], bool]) -> None:
    end = monotonic() + 60
    while not done():
        assert monotonic() < end, "it does not happen"
        sleep(0.05)


def alike(found: Output, theirs: Prefill) -> None:
    """Assert that an answer comes of the same rows as the native engine's, and is as good as the same."""
    assert found.report is not None
    assert found.report["cached"] == theirs.report.cached > 0
    recomputed = theirs.report.recomputed_positions or ()
    assert found.report["recomputed_positions"] == [p for p in recomputed if p < found.report["filled"]]
    assert kl(theirs.logits.log_softmax(-1), found.logprobs[0]) <= 1e-4


def outcomes(found: Output) -> list[str]:
    assert found.report is not None
    return [chunk["outcome"] for chunk in found.report["chunks"]]


def reason(found: Output, chunk: int) -> str:
    assert found.report is not None
    return str(found.report["chunks"][chunk]["reason"])


def _encode(half: Any, chunks: list[Chunk]) -> int:
    return sum(half.chunks.encode(chunk, TENANT)[1] for chunk in chunks)


def _forget(half: Any, chunk: Chunk, ranks: tuple[int, ...]) -> None:
    if half.chunks.decoder.shards.rank in ranks:
        keys = [half.chunks.key(chunk, TENANT)]
        half.chunks.forget(keys, half.chunks.give_up(keys))


def _has(half: Any, chunk: Chunk) -> bool:
    return bool(half.chunks.has(chunk, TENANT))


def _meet(half: Any) -> tuple[list[int], list[bool], int]:
    shards = half.chunks.decoder.shards
    scores = torch.rand(1001, generator=torch.Generator().manual_seed(shards.rank)) / 3
    flags = [True, shards.rank == 0, shards.rank == 1, True]
    return shards.total(scores).view(torch.int32).tolist(), shards.everywhere(flags), shards.first(10 + shards.rank)


def _under_way(half: Any) -> int:
    return int(half.queue.open)


def _fail_to_find(half: Any, fails: bool, rank: int) -> None:
    if half.chunks.decoder.shards.rank == rank:
        if fails:
            half.chunks.find = partial(_raise, RuntimeError("no more threads"))
        else:
            del half.chunks.find


def _raise(error: Exception, *args: Any) -> None:
    raise error


def _lose(half: Any, chunk: Chunk | None, rank: int) -> None:
    """Let layer 2 of a chunk fail on one rank; with ``None``, no longer."""
    from blend import filling

    if half.chunks.decoder.shards.rank != rank:
        return
    source: Any = filling._Source
    if chunk is None:
        source.layer = source.whole
        return
    doomed = half.chunks.key(chunk, TENANT)
    source.whole = good = source.layer

    def layer(self: Any, number: int) -> torch.Tensor:
        if number == 2 and self.wanted.content == doomed:
            raise filling.ChunkLost(self.wanted, "the cable was pulled")
        found: torch.Tensor = good(self, number)
        return found

    source.layer = layer


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
    alike(found, theirs)
    assert found.report is not None
    assert [c["nbytes"] for c in found.report["chunks"]] == [c.nbytes for c in theirs.report.chunks], "of both ranks"


def test_a_chunk_that_one_rank_has_not_got_is_a_miss_on_both(served: Vllm, native: Engine) -> None:
    prompt, plan = stored(300, served, native), Plan("query", ratio=0.15)
    second = tiny.chunks_of(prompt)[1]
    found = {}
    for ranks in ((0, 1), (1,), (0,)):
        everybody(served, partial(_forget, chunk=second, ranks=ranks))
        served.forget_prefixes()
        (found[ranks],) = served.ask(Ask(prompt, plan))
        assert outcomes(found[ranks]) == ["hit", "miss", "hit", "hit"]
        assert reason(found[ranks], 1) == "not stored"
        until(lambda: everybody(served, partial(_has, chunk=second)) == [True] * RANKS)  # both encode it when idle
    agree([found[1,], found[0,]], [found[0, 1]] * 2)
    served.forget_prefixes()
    assert outcomes(served.ask(Ask(prompt, plan))[0]) == ["hit"] * 4


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_chunk_that_one_rank_loses_is_lost_on_both(served: Vllm, native: Engine, rank: int) -> None:
    prompt, plan = stored(400 + rank, served, native), Plan("deviation", ratio=0.15)
    third = tiny.chunks_of(prompt)[2]
    everybody(served, partial(_lose, chunk=third, rank=rank))
    served.forget_prefixes()
    (lost,) = served.ask(Ask(prompt, plan))
    everybody(served, partial(_lose, chunk=None, rank=rank))
    assert outcomes(lost) == ["hit", "hit", "failed", "hit"]
    assert reason(lost, 2) == "the cable was pulled"
    everybody(served, partial(_forget, chunk=third, ranks=(0, 1)))
    served.forget_prefixes()
    (absent,) = served.ask(Ask(prompt, plan))
    assert outcomes(absent) == ["hit", "hit", "miss", "hit"]
    agree([lost], [absent])


def test_a_look_up_that_fails_on_one_rank_has_both_run_at_full_prefill(served: Vllm, native: Engine) -> None:
    prompt, plan = stored(450, served, native), Plan("head", ratio=0.15)
    served.forget_prefixes()
    (full,) = served.ask(Ask(prompt))
    everybody(served, partial(_fail_to_find, fails=True, rank=1))
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, plan))
    everybody(served, partial(_fail_to_find, fails=False, rank=1))
    agree([found], [full])
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, plan))
    assert outcomes(found) == ["hit"] * 4


def test_what_ranks_agree_on_is_the_same_on_each(served: Vllm) -> None:
    first, second = everybody(served, _meet)
    assert first == second
    assert first[1:] == ([True, False, False, True], 10)


def test_requests_beside_one_another(served: Vllm, native: Engine) -> None:
    """Blended ones are stopped and go on at the same places on both ranks, and others decode meanwhile."""
    prompts = [stored(500 + 10 * n, served, native) for n in range(3)]
    asks = [Ask(p, Plan(method, ratio=0.15)) for p, method in zip(prompts, ("head", "deviation", "query"), strict=True)]
    exact = [Ask(Prompt([Text((1, *tiny.random_ids(200 + n, 600 + n)))])) for n in range(2)]
    alone = []
    for ask in (*asks, *exact):
        served.forget_prefixes()
        alone += served.ask(ask, tokens=24)
    served.forget_prefixes()
    together = served.ask(*exact[:1], *asks, *exact[1:], tokens=24)
    agree(together, [alone[3], *alone[:3], alone[4]])
    assert any(found.report["paused_ms"] > 0 for found in together if found.report is not None)


def test_requests_that_are_given_up_leave_both_ranks_as_they_were(served: Vllm, native: Engine) -> None:
    from vllm import SamplingParams

    prompt, beside = stored(800, served, native), {"prompt_token_ids": list(tiny.random_ids(100, 801))}
    engine, made = served.llm.llm_engine, build_prompt(prompt.segments, Plan("query", ratio=0.15))
    served.forget_prefixes()
    (alone,) = served.ask(Ask(prompt, Plan("query", ratio=0.15)))
    for steps in range(1, 6):
        served.forget_prefixes()
        extra = {"kv_transfer_params": made["kv_transfer_params"]}
        params = SamplingParams(max_tokens=20, detokenize=False, ignore_eos=True)
        engine.add_request("beside", beside, params)
        engine.step()
        blended = SamplingParams(max_tokens=20, detokenize=False, extra_args=extra)
        engine.add_request("given up", {"prompt_token_ids": made["prompt_token_ids"]}, blended)
        for _ in range(steps):
            engine.step()
        engine.abort_request(["given up", "beside"])
        while engine.has_unfinished_requests():
            engine.step()
        until(lambda: everybody(served, _under_way) == [0] * RANKS)
    served.forget_prefixes()  # vLLM refuses while a block is in use
    agree(served.ask(Ask(prompt, Plan("query", ratio=0.15))), [alone])


def test_ranks_may_hold_the_same_head(model: Path, tmp_path: Path) -> None:
    """One KV head for two ranks: both have it, and share the query heads."""
    single = tiny.save_model(tmp_path / "model", **{**SIZES, "num_key_value_heads": 1})
    with tiny.engine(single, tmp_path / "store") as native, two_ranks(single, tmp_path / "store") as served:
        for seed, method in ((700, "deviation"), (710, "query")):
            prompt, plan = stored(seed, served, native), Plan(method, ratio=0.15)
            theirs = native.prefill(prompt, plan, positions=True)
            (found,) = served.ask(Ask(prompt, plan))
            alike(found, theirs)

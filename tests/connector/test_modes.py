"""A tiny random model in a real vLLM that compiles its graph, and whose few blocks make it preempt requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blend import Chunk, Engine, Plan, Prompt, Text
from tests import tiny
from tests.connector.conftest import Ask, Vllm, agree, kl, store_settings, vllm

pytestmark = pytest.mark.slow
SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=32)  # head sizes that vLLM has
BLOCKS = 10
"""Of 128 tokens, one of which is vLLM's own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path_factory.mktemp("store")) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(model: Path, native: Engine) -> Iterator[Vllm]:
    changes = dict(
        enforce_eager=False,
        max_model_len=1024,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=BLOCKS,
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    with vllm(model, store_settings(native.config.store.path), **changes) as made:
        yield made


def prompt_of(seed: int, native: Engine) -> Prompt:
    """480 tokens; the chunks are stored."""
    parts = [Text((1, *tiny.random_ids(9, seed)))]
    parts += [Chunk(tiny.random_ids(100 + 20 * n, seed + n + 1)) for n in range(3)]  # type: ignore[list-item]
    parts += [Chunk(tiny.random_ids(90, seed + 7)), Text(tiny.random_ids(20, seed + 9))]  # type: ignore[list-item]
    made = Prompt(parts)
    native.precompute(tiny.chunks_of(made))
    return made


@pytest.mark.parametrize("method", ["head", "deviation", "query"])
def test_a_compiled_model_blends_as_the_native_engine_does(served: Vllm, native: Engine, method: str) -> None:
    prompt = prompt_of(100, native)
    theirs = native.prefill(prompt, Plan(method, ratio=0.15), positions=True)
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, Plan(method, ratio=0.15)))
    assert found.report is not None
    recomputed = theirs.report.recomputed_positions or ()
    assert found.report["recomputed_positions"] == [p for p in recomputed if p < found.report["filled"]]
    assert kl(theirs.logits.log_softmax(-1), found.logprobs[0]) <= 1e-4


def test_a_compiled_model_at_ratio_one_is_its_own_full_prefill(served: Vllm, native: Engine) -> None:
    prompt = prompt_of(200, native)
    served.forget_prefixes()
    (full,) = served.ask(Ask(prompt), tokens=4)
    served.forget_prefixes()
    agree(served.ask(Ask(prompt, Plan("random", ratio=1.0)), tokens=4), [full])


def test_vllms_own_registry_has_the_connectors_metrics(served: Vllm, native: Engine) -> None:
    before = _metric(served, "vllm:blend_requests", outcome="blended")
    served.forget_prefixes()
    served.ask(Ask(prompt_of(250, native), Plan("head", ratio=0.15)))
    assert _metric(served, "vllm:blend_requests", outcome="blended") == before + 1
    assert _metric(served, "vllm:blend_chunks", outcome="hit") >= 4


def test_a_preempted_request_is_blended_again(served: Vllm, native: Engine) -> None:
    plan = Plan("query", ratio=0.15)
    prompts = [prompt_of(seed, native) for seed in (300, 400)]
    alone = []
    for prompt in prompts:
        served.forget_prefixes()
        alone += served.ask(Ask(prompt, plan), tokens=200)
    served.forget_prefixes()
    before = _metric(served, "vllm:num_preemptions")
    together = served.ask(*[Ask(prompt, plan) for prompt in prompts], tokens=200)
    assert _metric(served, "vllm:num_preemptions") > before
    agree(together, alone)


def test_an_exact_block_that_is_written_in_this_very_step_is_waited_for(served: Vllm, native: Engine) -> None:
    """A blended request that shares a header with one beside it, which nobody has computed yet."""
    base = prompt_of(500, native)
    header = Text((1, *tiny.random_ids(150, 501)))
    prompt, exact = Prompt([header, *base.segments[1:]]), Prompt([header, Text(tiny.random_ids(30, 502))])
    plan = Plan("head", ratio=1.0)
    served.forget_prefixes()
    alone = [*served.ask(Ask(exact)), *served.ask(Ask(prompt))]
    served.forget_prefixes()
    together = served.ask(Ask(exact), Ask(prompt, plan))
    report = together[1].report
    assert report is not None
    assert report["computed"] == 128
    agree(together, alone)


def test_aborted_requests_leave_the_engine_as_it_was(served: Vllm, native: Engine) -> None:
    from vllm import SamplingParams

    from blend.connector.client import build_prompt

    prompt = prompt_of(600, native)
    engine = served.llm.llm_engine
    for name in ("a", "b"):
        made = build_prompt(prompt, Plan("head", ratio=0.15))
        extra = {"kv_transfer_params": made["kv_transfer_params"]}
        params = SamplingParams(max_tokens=50, detokenize=False, extra_args=extra)
        engine.add_request(name, {"prompt_token_ids": made["prompt_token_ids"]}, params)
        if name == "b":
            engine.step()
    engine.abort_request(["a", "b"])
    while engine.has_unfinished_requests():
        engine.step()
    served.forget_prefixes()  # vLLM refuses while a block is in use
    (found,) = served.ask(Ask(prompt, Plan("head", ratio=0.15)))
    assert found.report is not None


def test_a_cache_that_is_laid_out_otherwise_is_refused(served: Vllm) -> None:
    served.forget_prefixes()
    assert served.inside(_layout_refusal) == ""
    assert "lays its cache out" in served.inside(partial(_layout_refusal, wrong=True))


def _layout_refusal(worker: Any, wrong: bool = False) -> str:
    """Run the self-test in vLLM's worker, on request with a write that misses by one slot."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from blend.connector.vllm.decoder import EngineDecoder, skeleton_of
    from blend.connector.vllm.pages import Pages
    from blend.connector.vllm.selftest import check_layout
    from blend.errors import ModelUnsupported

    class Missing(Pages):
        def write(self, layer: int, slots: Any, key: Any, value: Any) -> None:
            super().write(layer, slots.roll(1), key, value)

    config = worker.vllm_config
    layers = get_layers_from_vllm_config(config, Attention)
    model = worker.model_runner.model
    (group,) = worker.model_runner.kv_cache_config.kv_cache_groups
    decoder = EngineDecoder(model, layers, config, skeleton_of(Path(config.model_config.model)))
    pages = (Missing if wrong else Pages)(model, layers, config, group.kv_cache_spec)
    try:
        check_layout(pages, decoder, layers, config)
    except ModelUnsupported as error:
        return str(error)
    return ""


def _metric(served: Vllm, name: str, **labels: str) -> float:
    """A counter of vLLM's, over all labels that are not named."""
    return sum(
        metric.value
        for metric in served.llm.get_metrics()
        if metric.name == name and labels.items() <= metric.labels.items()
    )

"""A real vLLM, in a process of its own; where it is not installed its tests are skipped, and fail in CI."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Plan, Prompt
from blend.connector.client import build_prompt
from tests.conftest import IN_CI

# vLLM reads these when it is imported. A process that is not forked: it would inherit threads and numba from here.
for _name, _value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests look into the engine's process
}.items():
    os.environ.setdefault(_name, _value)


@dataclass(frozen=True)
class Output:
    """One answer: its tokens, log-probabilities ``[T, V]`` where all were asked for, and what was said of it."""

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    finish_reason: str | None
    cached: int
    report: Mapping[str, Any] | None


@dataclass(frozen=True)
class Ask:
    """One request: without a plan it has nothing to do with blending."""

    prompt: Prompt
    plan: Plan | None = None
    params: Mapping[str, Any] | None = None
    strict: bool = False


class Vllm:
    """vLLM with the connector, and every vocabulary entry's log-probability in its answers."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def ask(self, *asks: Ask, tokens: int = 2) -> list[Output]:
        """Run requests in one batch and return their answers."""
        from vllm import SamplingParams

        prompts, sampling = [], []
        for ask in asks:
            extra = ask.params
            if extra is None and ask.plan is not None:
                extra = build_prompt(ask.prompt, ask.plan, positions=True, strict=ask.strict)["kv_transfer_params"]
            prompts.append({"prompt_token_ids": list(ask.prompt.token_ids)})
            sampling.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=tokens,
                    ignore_eos=True,
                    logprobs=-1,
                    detokenize=False,
                    extra_args=None if extra is None else {"kv_transfer_params": extra},
                )
            )
        return [_output(found) for found in self.llm.generate(prompts, sampling, use_tqdm=False)]

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def inside(self, function: Any) -> Any:
        """Return what ``function`` returns of vLLM's worker, in whose process it is called."""
        return self.llm.collective_rpc(function)[0]


def _output(found: Any) -> Output:
    (answer,) = found.outputs
    rows = [torch.tensor([entry[token].logprob for token in range(len(entry))]) for entry in (answer.logprobs or ())]
    report = (found.kv_transfer_params or {}).get("blend")
    logprobs = torch.stack(rows) if rows else torch.zeros(0, 0)
    return Output(tuple(answer.token_ids), logprobs, answer.finish_reason, found.num_cached_tokens, report)


def require_vllm() -> None:
    """Skip what calls this, a module or a test, where vLLM is not installed; in CI that is a failure."""
    if importlib.util.find_spec("vllm") is not None:
        return
    if IN_CI and sys.version_info >= (3, 11):
        pytest.fail("CI needs vLLM: scripts/lib.sh installs it")
    pytest.skip("vLLM is not installed: scripts/test does that, on Python 3.11 and later", allow_module_level=True)


@contextmanager
def vllm(model: Path, store: Mapping[str, Any], extra: Mapping[str, Any] = {}, **changes: Any) -> Iterator[Vllm]:
    """Start vLLM with the connector on a model directory, float32, and end it."""
    require_vllm()
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="BlendConnector",
        kv_connector_module_path="blend.connector.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"store": dict(store), **extra},
    )
    with plain_vllm(model, kv_transfer_config=transfer, **changes) as made:
        yield made


@contextmanager
def plain_vllm(model: Path, **changes: Any) -> Iterator[Vllm]:
    """Start vLLM on a model directory, float32, and end it."""
    require_vllm()
    from vllm import LLM

    settings: dict[str, Any] = dict(
        dtype="float32", enforce_eager=True, max_model_len=2048, max_num_batched_tokens=512, max_logprobs=-1
    )
    llm = LLM(model=str(model), **{**settings, **changes})
    try:
        yield Vllm(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def store_settings(directory: Path) -> dict[str, Any]:
    """Settings of a small store, as plain values."""
    return dict(host_bytes=128 << 20, disk_bytes=512 << 20, directory=str(directory), fsync=False)


def kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL of two rows of log-probabilities, in nats."""
    return float((full.exp() * (full - other)).sum())


def agree(found: Sequence[Output], wanted: Sequence[Output], most: float = 1e-3) -> None:
    """Assert that answers are alike: log-probabilities, and tokens wherever the best two are not as good as equal."""
    for ours, theirs in zip(found, wanted, strict=True):
        for step, (one, other) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
            assert float((one - other).abs().max()) <= most
            best = other.topk(2).values
            if ours.token_ids[step] != theirs.token_ids[step]:
                assert float(best[0] - best[1]) <= 2e-3
                break


def remove_everything(_: Any) -> int:
    """In the worker: remove all objects; returns the bytes of the host tier that something still holds."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker: Any = get_kv_transfer_group().worker
    for tier in worker.store.tiers:
        for key in list(tier.keys()):
            worker.store.remove(key)
    host: int = next(tier.stats().used_bytes for tier in worker.store.tiers if tier.in_memory)
    return host

"""vLLM in this process with the connector, stepped by hand, so that every token's time is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from vllm_load import Mix, Request

from blend import Plan, Prompt
from blend.config import GiB
from blend.connector.client import build_prompt

TRIES = 6
"""How often passages that are not in the store yet are asked for."""


@dataclass
class Answer:
    """A request and what came of it: seconds of its arrival and of each token, and what vLLM and blend said.

    ``cached`` counts the tokens that vLLM did not compute itself; ``report`` is blend's, once the request has ended.
    """

    request_id: str
    tokens: int
    arrived: float
    stamps: list[float] = field(default_factory=list)
    cached: int = 0
    report: Mapping[str, Any] | None = None
    done: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from the request's arrival, its token ids in hand, to its first token."""
        return self.stamps[0] - self.arrived


class Served:
    """An engine of vLLM and the requests that run in it.

    The engine runs in this very process. One call of :meth:`step` is one step of it, and all tokens of a step get the
    time when it returned. So neither another process nor a queue is measured, and detokenizing is left out for all.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._running: dict[str, Answer] = {}
        self._asked = 0

    def settings(self) -> dict[str, Any]:
        """What a figure depends on besides the machine: vLLM's version and its settings."""
        from vllm import __version__

        config = self.engine.vllm_config
        return {
            "vllm": __version__,
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "compiled": not config.model_config.enforce_eager,
        }

    def add(self, prompt: Prompt, plan: Plan | None, tokens: int) -> Answer:
        """Begin a request for so many tokens, at full prefill without a plan.

        Each has a salt of its own, so that no request finds another's blocks in vLLM's prefix cache.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = None if plan is None else build_prompt(prompt.segments, plan, positions=True)["kv_transfer_params"]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if extra is None else {"kv_transfer_params": extra},
        )
        self._asked += 1
        name = str(self._asked)
        ids = {"prompt_token_ids": list(prompt.token_ids), "cache_salt": f"request {name}"}
        (rendered,) = self.engine.renderer.render_cmpl([ids])
        answer = Answer(name, len(prompt), perf_counter())
        self._running[name] = answer
        self.engine.add_request(name, rendered, sampling)
        return answer

    def step(self) -> None:
        """Run one step, and note the tokens that came of it."""
        outputs = self.engine.step()
        now = perf_counter()
        for output in outputs:
            answer = self._running[output.request_id]
            answer.stamps += [now] * len(output.outputs[0].token_ids)
            if output.finished:
                answer.done = True
                answer.cached = output.num_cached_tokens
                answer.report = (output.kv_transfer_params or {}).get("blend")
                del self._running[output.request_id]

    def until(self, holds: Callable[[], bool]) -> None:
        """Step until something holds."""
        while not holds():
            self.step()

    def ask(self, prompt: Prompt, plan: Plan | None, tokens: int = 2) -> Answer:
        """Run a request by itself; by default for two tokens, for one that ends with its first may have no report."""
        answer = self.add(prompt, plan, tokens)
        self.until(lambda: answer.done)
        self.settle()
        return answer

    def stop(self, answers: Sequence[Answer]) -> None:
        """End requests that run on."""
        self.engine.abort_request([answer.request_id for answer in answers])
        for answer in answers:
            self._running.pop(answer.request_id, None)
        self.settle()

    def settle(self) -> None:
        """Let the engine clear up after requests that have ended; missing chunks are encoded in such idle steps."""
        assert not self._running
        scheduler = self.engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self.engine.step()

    def fill(self, mix: Mix) -> None:
        """Have the mix's passages stored, as a service does: ask for them until all come out of host memory."""
        for prompt in mix.filling():
            for _ in range(TRIES):
                report = self.ask(prompt, Plan("reuse")).report
                if report is not None and all(_in_host(chunk) for chunk in report["chunks"]):
                    break
            else:
                raise SystemExit(f"passages are not in the host tier after {TRIES} tries: {report}")


def _in_host(chunk: Mapping[str, Any]) -> bool:
    return (chunk["outcome"], chunk["tier"]) == ("hit", "host")


def check_full(answer: Answer) -> None:
    """Stop the benchmark if a full prefill found anything in a cache."""
    if answer.cached or answer.report is not None:
        raise SystemExit(f"a full prefill was spared {answer.cached} tokens: this measures something else")


def check_blended(answer: Answer, request: Request, method: str) -> Mapping[str, Any]:
    """Return the report; stop the benchmark if not exactly the stored tokens came out of the host tier."""
    report = answer.report
    if report is None:
        raise SystemExit("a request was not blended at all: see the engine's warnings")
    stored = sum(chunk["tokens"] for chunk in report["chunks"] if _in_host(chunk))
    wanted = {"method": method, "computed": 0, "cached": request.stored}
    found = {name: report[name] for name in wanted}
    if found != wanted or stored != request.stored:
        raise SystemExit(f"{found} with {stored} tokens of the host tier, not {wanted}: this measures something else")
    return report


@contextmanager
def serve(
    model: Path, name: str, dtype: str, *, room: int, chunk_tokens: int, batched: int | None, eager: bool
) -> Iterator[Served]:
    """Start vLLM with the settings of ``vllm serve``, and end it.

    Args:
        model: directory of the model.
        name: what blend calls it.
        dtype: of weights, KV and chunks.
        room: tokens of the paged cache that requests need at the same time.
        chunk_tokens: tokens of chunks that the host tier has to hold; there is no other tier.
        batched: most tokens of a step, or ``None`` for vLLM's own default.
        eager: leave the model uncompiled, which vLLM does not by default.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    nbytes = config.num_hidden_layers * 2 * heads * width * (4 if dtype == "float32" else 2)
    # vLLM reads these when it is imported. Its messages leave stdout to the figures.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(ceil(1.25 * room * nbytes / GiB))
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    with TemporaryDirectory() as directory:
        store = {"host_bytes": max(256 << 20, 2 * chunk_tokens * nbytes), "disk_bytes": 0, "directory": directory}
        transfer = KVTransferConfig(
            kv_connector="BlendConnector",
            kv_connector_module_path="blend.connector.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"model": name, "store": store},
        )
        arguments = EngineArgs(
            model=str(model),
            dtype=dtype,
            enforce_eager=eager,
            max_num_batched_tokens=batched,
            kv_transfer_config=transfer,
            disable_log_stats=True,
        )
        engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        try:
            yield Served(engine)
        finally:
            engine.engine_core.shutdown()

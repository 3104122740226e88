"""Blending beside other requests: they go on meanwhile, and nothing is left of what is given up half way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blend import Engine, Plan, Prompt
from blend.connector.client import build_prompt
from tests import tiny
from tests.connector.conftest import Ask, Vllm, agree, remove_everything, store_settings, vllm
from tests.connector.test_modes import SIZES, prompt_of

pytestmark = pytest.mark.slow
PLAN = Plan("query", ratio=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path_factory.mktemp("store")) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(model: Path, native: Engine) -> Iterator[Vllm]:
    """Steps have so little time for blending that it stops at every checkpoint."""
    store = store_settings(native.config.store.path)
    with vllm(
        model, store, {"step_share": 1e-6, "reset_removes": True}, max_model_len=1024, skip_tokenizer_init=True
    ) as made:
        yield made


class Beside:
    """A decoding request, and others that come meanwhile."""

    def __init__(self, served: Vllm, prompt: Prompt) -> None:
        self.engine = served.llm.llm_engine
        self.outputs: dict[str, Any] = {}
        self.add("stream", prompt, None, 900)
        self.until(lambda: self.tokens("stream") >= 3)

    def add(self, name: str, prompt: Prompt, plan: Plan | None, tokens: int) -> None:
        from vllm import SamplingParams

        made = None if plan is None else build_prompt(prompt, plan)["kv_transfer_params"]
        extra = None if made is None else {"kv_transfer_params": made}
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=-1, detokenize=False, extra_args=extra
        )
        self.engine.add_request(name, {"prompt_token_ids": list(prompt.token_ids)}, params)

    def tokens(self, name: str) -> int:
        """How many tokens a request has."""
        return len(self.outputs[name].outputs[0].token_ids) if name in self.outputs else 0

    def step(self) -> None:
        """Take what has come."""
        self.outputs.update((output.request_id, output) for output in self.engine.step())

    def until(self, holds: Any) -> None:
        """Go on until something holds."""
        while not holds():
            assert self.engine.has_unfinished_requests()
            self.step()

    def end(self) -> None:
        """End the decoding request."""
        self.engine.abort_request(["stream"])
        while self.engine.has_unfinished_requests():
            self.step()


@pytest.fixture
def stream(served: Vllm) -> Iterator[Beside]:
    served.forget_prefixes()
    beside = Beside(served, Prompt([tiny.prompt(seed=3).segments[0]]))
    yield beside
    beside.end()


def test_tokens_of_others_come_while_a_request_is_blended(served: Vllm, native: Engine) -> None:
    prompt = prompt_of(900, native)
    served.ask(Ask(prompt, PLAN))  # its chunks are in memory from here on
    served.forget_prefixes()
    stream = Beside(served, Prompt([tiny.prompt(seed=3).segments[0]]))
    before = stream.tokens("stream")
    stream.add("blended", prompt, PLAN, 2)
    stream.until(lambda: stream.tokens("blended"))
    assert stream.tokens("stream") - before > 20
    stream.until(lambda: stream.outputs["blended"].finished)
    report = stream.outputs["blended"].kv_transfer_params["blend"]
    assert report["paused_ms"] > 0
    theirs = native.prefill(prompt, PLAN)
    entry = stream.outputs["blended"].outputs[0].logprobs[0]
    wanted = theirs.logits.log_softmax(-1)
    assert max(abs(entry[token].logprob - float(wanted[token])) for token in range(len(wanted))) <= 1e-3
    stream.end()


def test_what_decodes_meanwhile_is_not_disturbed(served: Vllm, native: Engine, stream: Beside) -> None:
    stream.until(lambda: stream.tokens("stream") >= 40)
    alone = list(stream.outputs["stream"].outputs[0].token_ids[:40])
    stream.end()
    served.forget_prefixes()
    again = Beside(served, Prompt([tiny.prompt(seed=3).segments[0]]))
    again.add("blended", prompt_of(910, native), PLAN, 2)
    again.until(lambda: again.tokens("stream") >= 40 and again.tokens("blended"))
    assert list(again.outputs["stream"].outputs[0].token_ids[:40]) == alone
    again.end()


@pytest.mark.parametrize("steps", [0, 1, 6, 25])
def test_a_request_that_is_given_up_half_way_leaves_nothing(
    served: Vllm, native: Engine, stream: Beside, steps: int
) -> None:
    prompt = prompt_of(920 + steps, native)
    stream.add("blended", prompt, PLAN, 2)
    for _ in range(steps):
        stream.step()
    stream.engine.abort_request(["blended"])
    for _ in range(3):
        stream.step()
    stream.end()
    served.forget_prefixes()  # vLLM refuses while a block is in use
    assert served.inside(_under_way) == 0
    full = served.ask(Ask(prompt))
    served.forget_prefixes()
    agree(served.ask(Ask(prompt, Plan("head", ratio=1.0))), full)


def test_the_same_request_twice_at_a_time_is_blended_once(served: Vllm, native: Engine) -> None:
    prompt = prompt_of(960, native)
    served.forget_prefixes()
    first, second = served.ask(Ask(prompt, PLAN), Ask(prompt, PLAN))
    assert first.report is not None and second.report is not None
    assert (first.report["computed"], second.report["computed"]) == (0, len(prompt) // 128 * 128)
    agree([second], [first])


def test_many_at_a_time_are_each_given_their_own(served: Vllm, native: Engine) -> None:
    prompts = [prompt_of(1000 + 20 * n, native) for n in range(6)]
    alone = []
    for prompt in prompts:
        served.forget_prefixes()
        alone += served.ask(Ask(prompt, PLAN))
    served.forget_prefixes()
    agree(served.ask(*[Ask(prompt, PLAN) for prompt in prompts]), alone)


def test_a_reset_of_the_connector_removes_the_models_chunks(served: Vllm, native: Engine) -> None:
    prompt = prompt_of(1200, native)
    (before,) = served.ask(Ask(prompt, PLAN))
    assert before.report is not None
    assert before.report["cached"] > 0
    assert served.llm.reset_prefix_cache(reset_connector=True)
    (after,) = served.ask(Ask(prompt, PLAN))
    assert after.report is not None
    assert [chunk["outcome"] for chunk in after.report["chunks"]] == ["miss"] * 4


def test_nothing_is_held_at_the_end(served: Vllm) -> None:
    assert served.inside(_under_way) == 0
    assert served.inside(remove_everything) == 0


def _under_way(_: Any) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found: int = get_kv_transfer_group().worker.queue.open
    return found

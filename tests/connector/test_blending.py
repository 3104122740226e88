"""The default model in a real vLLM, beside the native engine: exact when asked to be, and alike when not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from blend import Chunk, Engine, EngineConfig, Plan, Prompt, StoreConfig, Text
from blend.connector.client import build_prompt
from tests.connector.conftest import Ask, Output, Vllm, agree, kl, remove_everything, store_settings, vllm
from tests.tiny import chunks_of

pytestmark = pytest.mark.slow
METHODS = ("reuse", "head", "random", "deviation", "query")
RATIO = 0.15
TOPICS = ("rivers", "bridges", "printing", "weather", "glass", "maps", "tea", "clocks")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def native(directory: Path, default_model_dir: Path) -> Iterator[Engine]:
    store = StoreConfig(**store_settings(directory))
    with Engine(EngineConfig(device="cpu", dtype="float32", recompute_misses=False, store=store)) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(directory: Path, default_model_dir: Path) -> Iterator[Vllm]:
    with vllm(default_model_dir, store_settings(directory), {"model": "smollm2-135m"}) as made:
        yield made


def passage(engine: Engine, topic: str, sentences: int) -> Chunk:
    text = " ".join(
        f"Fact {n} about {topic}: in {1500 + 37 * n} somebody in town {n * 7 % 11} changed how {topic} were made."
        for n in range(sentences)
    )
    return Chunk(engine.tokenize(text + "\n"))


def prompt_of(engine: Engine, topics: tuple[str, ...], sentences: int = 5, question: str = "What changed?") -> Prompt:
    header = Text(engine.tokenize_template("<|im_start|>user\nAnswer from the passages.\n"))
    end = Text(engine.tokenize_template(f"{question}<|im_end|>\n<|im_start|>assistant\n"))
    return Prompt([header, *(passage(engine, t, sentences + n % 3) for n, t in enumerate(topics)), end])


@pytest.fixture(scope="module")
def prompt(native: Engine) -> Prompt:
    """About 700 tokens, so that a full prefill needs two steps; its chunks are stored."""
    made = prompt_of(native, TOPICS[:4])
    native.precompute(chunks_of(made))
    assert 512 < len(made) < 1400, len(made)
    return made


@pytest.fixture(scope="module")
def full(served: Vllm, prompt: Prompt) -> Output:
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt), tokens=4)
    return found


def test_ratio_one_is_vllms_own_full_prefill(served: Vllm, prompt: Prompt, full: Output) -> None:
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, Plan("random", ratio=1.0)), tokens=4)
    assert found.report is not None
    assert found.report["cached"] == sum(map(len, chunks_of(prompt))) == found.report["selected"]
    agree([found], [full])


def test_ratio_one_beside_other_requests_and_behind_a_shared_prefix(
    served: Vllm, native: Engine, prompt: Prompt, full: Output
) -> None:
    other = prompt_of(native, TOPICS[2:6])
    served.forget_prefixes()
    (alone,) = served.ask(Ask(other), tokens=4)
    served.forget_prefixes()
    everything = Plan("head", ratio=1.0)
    asks = [Ask(prompt, everything), Ask(other), Ask(other, everything), Ask(prompt)]
    agree(served.ask(*asks, tokens=4), [full, alone, alone, full])
    agree(served.ask(*asks, tokens=4), [full, alone, alone, full])  # now all of it is found in blocks


@pytest.mark.parametrize("method", METHODS)
def test_the_native_engine_chooses_the_same_rows_and_answers_alike(
    served: Vllm, native: Engine, prompt: Prompt, full: Output, method: str
) -> None:
    plan = Plan(method) if method == "reuse" else Plan(method, ratio=RATIO)
    theirs = native.prefill(prompt, plan, positions=True)
    (found,) = served.ask(Ask(prompt, plan))
    report = found.report
    assert report is not None
    end = report["computed"] + report["filled"]
    recomputed = theirs.report.recomputed_positions or ()
    assert report["recomputed_positions"] == [p for p in recomputed if report["computed"] <= p < end]
    assert (report["cached"], report["selected"]) == (theirs.report.cached, theirs.report.selected)
    assert report["charged_ratio"] == pytest.approx(theirs.report.charged_ratio)
    ours = found.logprobs[0]
    assert kl(ours, theirs.logits.log_softmax(-1)) <= 1e-4
    assert kl(full.logprobs[0], ours) > 1e-3, "nothing was blended"


def test_the_same_request_again_meets_its_own_blocks(served: Vllm, prompt: Prompt) -> None:
    served.forget_prefixes()
    first, second = (served.ask(Ask(prompt, Plan("query", ratio=RATIO)))[0] for _ in range(2))
    assert first.report is not None and second.report is not None
    assert (first.report["computed"], second.report["computed"]) == (0, len(prompt) // 128 * 128)
    assert second.report["selected_positions"] == first.report["selected_positions"]
    agree([second], [first])


def test_blended_blocks_never_serve_anybody_else(served: Vllm, native: Engine, prompt: Prompt) -> None:
    """Pollution: blended and exact requests with shared prefixes, in seeded random order."""
    other = Prompt([*prompt.segments[:-2], Text(native.tokenize("Something else entirely."))])
    shorter = Prompt(prompt.segments[:3])
    exact: dict[Prompt, Output] = {}
    for each in (prompt, other, shorter):
        served.forget_prefixes()
        (exact[each],) = served.ask(Ask(each))
    served.forget_prefixes()
    generator = torch.Generator().manual_seed(7)
    plans = [None, None, Plan("reuse"), Plan("head", ratio=RATIO), Plan("query", ratio=RATIO)]
    blended: dict[tuple[Prompt, Plan], Output] = {}
    for _ in range(24):
        each = list(exact)[int(torch.randint(3, (1,), generator=generator))]
        plan = plans[int(torch.randint(5, (1,), generator=generator))]
        (found,) = served.ask(Ask(each, plan))
        agree([found], [exact[each] if plan is None else blended.setdefault((each, plan), found)])
    assert blended


def test_another_question_meets_no_block_that_was_chosen_for_this_one(
    served: Vllm, native: Engine, prompt: Prompt
) -> None:
    other = Prompt([*prompt.segments[:-1], Text(native.tokenize("Who made clocks, and when?"))])
    reports = [served.ask(Ask(p, Plan("query", ratio=RATIO)))[0].report for p in (prompt, other)]
    assert reports[1] is not None
    assert reports[1]["computed"] == 0
    heads = [served.ask(Ask(p, Plan("head", ratio=RATIO)))[0].report for p in (prompt, other)]
    assert heads[1] is not None
    assert heads[1]["computed"] > 0  # chosen by position alone, whatever is asked


def test_exact_blocks_before_the_first_chunk_are_shared(served: Vllm, native: Engine, prompt: Prompt) -> None:
    header = Text(native.tokenize_template("<|im_start|>system\n" + "Be brief and exact. " * 40))
    assert len(header) > 128
    long = Prompt([header, *prompt.segments])
    served.forget_prefixes()
    (alone,) = served.ask(Ask(long))
    (found,) = served.ask(Ask(long, Plan("head", ratio=1.0)))
    assert found.report is not None
    assert found.report["computed"] == len(header) // 128 * 128 > 0
    agree([found], [alone])
    agree(served.ask(Ask(long)), [alone])


def test_missing_chunks_are_computed_and_encoded_later_for_both_engines(served: Vllm, native: Engine) -> None:
    fresh = prompt_of(native, ("lamps", "ropes"))
    (exact,) = served.ask(Ask(fresh))
    (found,) = served.ask(Ask(fresh, Plan("reuse")))
    assert found.report is not None
    assert found.report["cached"] == 0
    assert [c["outcome"] for c in found.report["chunks"]] == ["miss", "miss"]
    agree([found], [exact])
    _until(lambda: native.missing(chunks_of(fresh)) == [])
    report = native.prefill(fresh, Plan("reuse")).report
    assert [c.outcome for c in report.chunks] == ["hit", "hit"]
    served.forget_prefixes()
    (found,) = served.ask(Ask(fresh, Plan("reuse")))
    assert found.report is not None
    assert found.report["cached"] == sum(map(len, chunks_of(fresh)))
    wanted = native.prefill(fresh, Plan("reuse")).logits.log_softmax(-1)
    assert kl(wanted, found.logprobs[0]) <= 1e-4


def test_a_corrupt_chunk_costs_that_chunk_alone(served: Vllm, native: Engine, directory: Path, tmp_path: Path) -> None:
    """The answer is the one that the same plan gives with that chunk absent."""
    made = prompt_of(native, ("mills", "coins", "ships"))
    first, second, third = chunks_of(made)
    before = set(directory.rglob("*"))
    native.precompute([second])
    _until(lambda: bool(set(directory.rglob("*")) - before))
    for file in set(directory.rglob("*")) - before:
        if file.is_file() and file.stat().st_size > 100_000:
            data = bytearray(file.read_bytes())
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            file.write_bytes(data)
    native.precompute([first, third])
    (found,) = served.ask(Ask(made, Plan("query", ratio=RATIO)))
    assert found.report is not None
    assert [c["outcome"] for c in found.report["chunks"]] == ["hit", "failed", "hit"]
    store = StoreConfig(**store_settings(tmp_path))
    with Engine(replace(native.config, store=store)) as without:
        without.precompute([first, third])
        wanted = without.prefill(made, Plan("query", ratio=RATIO)).logits.log_softmax(-1)
    assert kl(wanted, found.logprobs[0]) <= 1e-4


def wrong(prompt: Prompt, **changes: Any) -> dict[str, Any]:
    made = build_prompt(prompt, Plan("head", ratio=RATIO))["kv_transfer_params"]
    made["blend"].update(changes)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": [{"start": 0, "end": 40}, {"start": 30, "end": 60}]},
        {"segments": [{"start": 0, "end": 1 << 20}]},
        {"segments": [{"start": 5, "end": 60, "digest": "0" * 32}]},
        {"plan": {"method": "head", "ratio": 1.5}},
        {"plan": {"method": "no such method"}},
        {"more": 1},
    ],
    ids=["overlap", "past the end", "other tokens", "ratio", "method", "field"],
)
def test_a_wrong_request_is_served_at_full_prefill_or_refused(
    served: Vllm, prompt: Prompt, full: Output, changes: dict[str, Any]
) -> None:
    lenient = Ask(prompt, params=wrong(prompt, **changes))
    strict = Ask(prompt, params=wrong(prompt, **changes, strict=True))
    found, refused, fine = served.ask(lenient, strict, Ask(prompt, Plan("head", ratio=1.0)))
    assert found.report is None
    assert found.token_ids == full.token_ids[:2]
    assert (refused.finish_reason, refused.token_ids) == ("error", ())
    assert fine.token_ids == full.token_ids[:2]


def test_nothing_is_held_when_requests_have_ended(served: Vllm, prompt: Prompt) -> None:
    """Objects that are removed give their bytes back only when no lease, nor any view of one, is left."""
    served.ask(*[Ask(prompt, Plan(method)) for method in METHODS])
    assert served.inside(remove_everything) == 0


def _until(holds: Any, seconds: float = 30.0) -> None:
    end = monotonic() + seconds
    while not holds():
        assert monotonic() < end, "it never came true"
        sleep(0.05)

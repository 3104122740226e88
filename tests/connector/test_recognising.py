"""Ordinary prompts in a real vLLM: passages somewhere in a text, tokenized as one with what is beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from blend import Chunk, Engine, EngineConfig, Part, Plan, Prompt, StoreConfig, Text
from blend.connector.client import ask_to_recognise, build_prompt
from tests.connector.conftest import Ask, Output, Vllm, agree, kl, store_settings, vllm

pytestmark = pytest.mark.slow


def passage(topic: str) -> str:
    return " ".join(
        f"Fact {n} about {topic}: in {1500 + 37 * n} somebody in town {n * 7 % 11} changed how {topic} were made."
        for n in range(6)
    )


BRIDGES, MAPS, TEAS = map(passage, ("bridges", "maps", "teas"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Engine]:
    """The native engine on the store that vLLM starts on; two passages are in it, each with a line's end."""
    store = StoreConfig(**store_settings(tmp_path_factory.mktemp("store")))
    with Engine(EngineConfig(device="cpu", dtype="float32", recompute_misses=False, store=store)) as engine:
        engine.precompute([chunk_of(engine, BRIDGES), chunk_of(engine, MAPS)])
        assert engine.wait_idle(60)
        yield engine


@pytest.fixture(scope="module")
def served(native: Engine, default_model_dir: Path) -> Iterator[Vllm]:
    store = store_settings(native.config.store.path)
    with vllm(default_model_dir, store, {"model": "smollm2-135m", "recognise": "always"}) as made:
        yield made


def chunk_of(engine: Engine, text: str) -> Chunk:
    return Chunk(engine.tokenize(text + "\n"))


def text_with(engine: Engine, *passages: str) -> Prompt:
    """An ordinary prompt. Behind its passages stands something else than a line's end, before one of them a quote."""
    notes = " -- and ".join(f'they say: "{each}"' for each in passages)
    return Prompt([Text(engine.tokenize(f"I was told two things, {notes}; so what was changed, and who did it?"))])


def exact(served: Vllm, prompt: Prompt) -> Output:
    served.forget_prefixes()
    (found,) = served.ask(Ask(prompt, params=ask_to_recognise(Plan("full"))))
    assert found.report is None
    return found


def test_passages_that_stand_in_a_text_are_blended(served: Vllm, native: Engine) -> None:
    chunks = [chunk_of(native, MAPS), chunk_of(native, BRIDGES)]
    text = text_with(native, MAPS, BRIDGES)
    full = exact(served, text)
    everything, as_it_is = Plan("random", ratio=1.0), Plan("reuse")
    (found,) = served.ask(Ask(text, params=ask_to_recognise(everything, positions=True)))
    assert found.report is not None
    seen = found.report["chunks"]
    assert [c["key"] for c in seen] == [native.content_key(chunk) for chunk in chunks]
    assert [c["outcome"] for c in seen] == ["hit", "hit"]
    lacking = [len(chunk) - c["tokens"] for chunk, c in zip(chunks, seen, strict=True)]
    assert all(0 < tokens <= 8 for tokens in lacking), "their seams are others"
    assert found.report["selected"] == found.report["cached"] == sum(c["tokens"] for c in seen)
    agree([found], [full])
    (found,) = served.ask(Ask(text, params=ask_to_recognise(as_it_is)))
    wanted = native.prefill(parts_of(text, chunks, seen), as_it_is).logits.log_softmax(-1)
    assert kl(wanted, found.logprobs[0]) <= 1e-4
    assert kl(full.logprobs[0], found.logprobs[0]) > 1e-3, "nothing was blended"


def parts_of(text: Prompt, chunks: list[Chunk], seen: list[dict[str, Any]]) -> Prompt:
    """The prompt as the report says that it was taken."""
    ids, at, segments = text.token_ids, 0, list[Part | Text]()
    for chunk, report in zip(chunks, seen, strict=True):
        start, end = report["start"], report["start"] + report["tokens"]
        tokens = ids[start:end]
        first = next(i for i in range(9) if chunk.token_ids[i : i + len(tokens)] == tokens)
        segments += [Text(ids[at:start]), Part(chunk, first, first + len(tokens))]
        at = end
    return Prompt([*segments, Text(ids[at:])])


def test_every_prompt_is_looked_at_but_for_those_of_other_tenants(served: Vllm, native: Engine) -> None:
    text = text_with(native, BRIDGES, MAPS)
    served.forget_prefixes()
    (found, theirs) = served.ask(Ask(text), Ask(text, params=ask_to_recognise(Plan("reuse"), tenant="acme")))
    assert found.report is not None
    assert len(found.report["chunks"]) == 2
    assert theirs.report is None
    agree([theirs], [exact(served, text)])


def test_what_a_request_names_is_found_in_later_ones(served: Vllm, native: Engine) -> None:
    teas, reuse = chunk_of(native, TEAS), Plan("reuse")
    text = text_with(native, TEAS)
    assert served.ask(Ask(text, params=ask_to_recognise(reuse)))[0].report is None
    named = Prompt([teas, Text(native.tokenize("And?"))])
    served.ask(Ask(named, params=build_prompt(named, reuse)["kv_transfer_params"]))
    end = monotonic() + 60
    while native.missing([teas]):
        assert monotonic() < end, "it was never encoded"
        sleep(0.1)
    (found,) = served.ask(Ask(text, params=ask_to_recognise(reuse)))
    assert found.report is not None
    assert [(c["key"], c["outcome"]) for c in found.report["chunks"]] == [(native.content_key(teas), "hit")]

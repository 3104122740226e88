"""Answers of requests that are computed together are those of each alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
import torch

from blend import Answer, Chunk, Engine, Plan, Prompt, Sampling, Text, Token
from blend.errors import Cancelled, DeadlineExceeded, InvalidInput, ResourceExhausted
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.memory import Canvases
from tests import tiny
from tests.serving.fakes import busy, wait_until

TIE = 2e-3


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tiny.save_model(tmp_path_factory.mktemp("model"), request.param)
    with tiny.engine(model, tmp_path_factory.mktemp("store"), shared_rows=48) as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tiny.save_model(tmp_path_factory.mktemp("model"))
    with tiny.engine(model, tmp_path_factory.mktemp("store"), max_waiting=2, max_running=2) as made:
        yield made


PLANS = [
    Plan("full"),
    Plan("query", 0.2),
    Plan("reuse"),
    Plan("deviation", 0.3),
    Plan("head", 0.1),
    Plan("full"),
    Plan("random", 0.5),
    Plan("query", 0.6),
]


def requests() -> list[tuple[Prompt, Plan, int]]:
    """Eight of different lengths and methods; of one nothing is stored, two are the same."""
    prompts = [tiny.prompt(1 + i % 4, seed=10 * i, length=23 + 9 * i, question=5 + i) for i in range(7)]
    return list(zip([*prompts, prompts[1]], PLANS, (12, 3, 25, 1, 17, 30, 8, 21), strict=True))


def same_up_to_near_ties(engine: Engine, prompt: Prompt, plan: Plan, got: Answer, want: Answer) -> None:
    """The same tokens, or others only from a place on where the two likeliest are next to equal."""
    if got.token_ids == want.token_ids:
        return
    at = next(i for i, pair in enumerate(zip(got.token_ids, want.token_ids, strict=False)) if pair[0] != pair[1])
    best = engine.score(prompt, want.token_ids[: at + 1], plan)[-1].topk(2).values
    assert best[0] - best[1] < TIE


def test_eight_mixed_requests_that_join_midway_answer_as_each_alone(engine: Engine) -> None:
    asked = requests()
    for prompt, _, _ in asked[:6]:
        engine.precompute(tiny.chunks_of(prompt))
    alone = [engine.generate(p, plan=plan, max_new_tokens=n) for p, plan, n in asked]
    streams = []
    for prompt, plan, count in asked:
        streams.append(engine.stream(prompt, plan=plan, max_new_tokens=count))
        next(streams[-1])  # the next one joins while this one decodes
    answers = [list(stream)[-1] for stream in streams]
    with busy(engine._scheduler):  # and all at once
        streams = [engine.stream(p, plan=plan, max_new_tokens=n) for p, plan, n in asked]
    answers += [list(stream)[-1] for stream in streams]
    for (prompt, plan, _), got, want in zip(asked * 2, answers, alone * 2, strict=True):
        assert isinstance(got, Answer)
        same_up_to_near_ties(engine, prompt, plan, got, want)
        assert (got.report.cached, got.report.selected) == (want.report.cached, want.report.selected)
        assert got.usage == want.usage


def test_prefills_that_share_passes_give_the_same_logits(engine: Engine) -> None:
    asked = requests()
    for prompt, _, _ in asked[:6]:
        engine.precompute(tiny.chunks_of(prompt))
    alone = [engine.prefill(p, plan) for p, plan, _ in asked]
    found: dict[int, torch.Tensor] = {}

    def ask(number: int) -> None:
        prompt, plan, _ = asked[number]
        found[number] = engine.prefill(prompt, plan).logits

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    with busy(engine._scheduler):
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.stats().waiting == len(asked))
    for thread in threads:
        thread.join(60)
    for number, want in enumerate(alone):
        assert (found[number] - want.logits).abs().max() <= 1e-4 * max(1.0, float(want.logits.abs().max()))


def test_a_shared_pass_that_fails_leaves_no_trace_in_the_logits(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, prompt = Plan("query", 0.4), tiny.prompt(2, seed=1)
    small.precompute(tiny.chunks_of(prompt))
    alone = small.prefill(prompt, plan).logits
    kernels, failed = small.decoder.kernels, []

    def attend(query: torch.Tensor, memory: Canvases, layer: int, batch: Batch, **options: Any) -> torch.Tensor:
        if len(batch.starts) == 3 and layer == 2 and not failed:
            failed.append(layer)
            raise RuntimeError("once")
        return kernels.attend(query, memory, layer, batch, **options)

    stream = small.stream(tiny.prompt(), max_new_tokens=850, plan=Plan("full"))
    next(stream)  # from now on it has a row in every pass
    monkeypatch.setattr(small.decoder, "kernels", replace(kernels, attend=attend))
    found = small.prefill(prompt, plan).logits
    stream.cancel()
    assert failed
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_the_same_seed_gives_the_same_answer_whatever_runs_beside_it(engine: Engine) -> None:
    prompt, sampling = tiny.prompt(), Sampling(temperature=0.9, top_p=0.95, seed=11, max_new_tokens=25)
    alone = engine.generate(prompt, sampling=sampling, plan=Plan("full"))
    assert engine.generate(prompt, sampling=sampling, plan=Plan("full")).token_ids == alone.token_ids
    with busy(engine._scheduler):
        streams = [
            engine.stream(tiny.prompt(seed=s), plan=Plan("full"), sampling=Sampling(temperature=1.0)) for s in range(3)
        ]
        streams.append(engine.stream(prompt, sampling=sampling, plan=Plan("full")))
    assert list(streams[-1])[-1].token_ids == alone.token_ids  # type: ignore[union-attr]
    other = Sampling(temperature=0.9, top_p=0.95, seed=12, max_new_tokens=25)
    assert engine.generate(prompt, sampling=other, plan=Plan("full")).token_ids != alone.token_ids


def test_a_stop_string_ends_the_answer_and_no_part_of_it_is_streamed(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0, seed=4, max_new_tokens=60)
    whole = engine.generate(tiny.prompt(), sampling=sampling, plan=Plan("full"))
    stop = whole.text[9:12]
    stopping = Sampling(temperature=1.0, seed=4, max_new_tokens=60, stop=("never in there", stop))
    *tokens, last = engine.stream(tiny.prompt(), sampling=stopping, plan=Plan("full"))
    assert isinstance(last, Answer)
    assert last.text == whole.text[: whole.text.find(stop)]
    assert "".join(t.text for t in tokens if isinstance(t, Token)) == last.text
    assert last.finish_reason == "stop"
    assert last.token_ids == whole.token_ids[: len(last.token_ids)]
    assert last.usage.completion_tokens == len(tokens)


def test_settings_of_one_call(engine: Engine) -> None:
    few = Sampling(max_new_tokens=2)
    assert len(engine.generate(tiny.prompt(), sampling=few, plan=Plan("full")).token_ids) == 2
    assert len(engine.generate(tiny.prompt(), sampling=few, max_new_tokens=3, plan=Plan("full")).token_ids) == 3
    with pytest.raises(InvalidInput, match="sampling"):
        engine.stream(tiny.prompt(), sampling=0.7)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="deadline"):
        engine.stream(tiny.prompt(), deadline="soon")  # type: ignore[arg-type]


def test_an_answer_needs_no_reader_and_its_canvas_goes_when_it_ends(small: Engine) -> None:
    stream = small.stream(tiny.prompt(), max_new_tokens=12, plan=Plan("full"))
    wait_until(lambda: not small._scheduler.crowded and not small._admission._rooms)
    tokens = list(stream)
    assert len(tokens) == 13
    assert list(stream) == []


def test_a_stream_that_is_dropped_is_cancelled(small: Engine) -> None:
    stream = small.stream(tiny.prompt(), max_new_tokens=850, plan=Plan("full"))
    next(stream)
    before = small.stats().counters["new_tokens"]
    del stream
    gc.collect()
    wait_until(lambda: not small._admission._rooms)
    assert small.stats().counters["new_tokens"] - before < 800


def test_a_cancelled_answer_says_so_and_keeps_what_there_is(small: Engine) -> None:
    stream = small.stream(tiny.prompt(), max_new_tokens=850, plan=Plan("full"), compare_full=True)
    next(stream)
    stream.cancel()
    *_, last = stream
    assert isinstance(last, Answer)
    assert last.finish_reason == "cancelled"
    assert 1 <= len(last.token_ids) < 850
    with busy(small._scheduler):
        stream = small.stream(tiny.prompt(), plan=Plan("full"))
        stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)


def test_a_deadline_ends_an_answer_with_what_there_is_or_refuses_it(small: Engine) -> None:
    answer = small.generate(tiny.prompt(), max_new_tokens=850, plan=Plan("full"), deadline=monotonic() + 1.0)
    assert answer.finish_reason in ("deadline", "length")
    with pytest.raises(DeadlineExceeded):
        small.stream(tiny.prompt(), plan=Plan("full"), deadline=monotonic() - 1)
    with busy(small._scheduler):
        stream = small.stream(tiny.prompt(), plan=Plan("full"), deadline=monotonic() + 0.5)
        wait_until(lambda: monotonic() > (stream._job.deadline or 0.0))
    with pytest.raises(DeadlineExceeded):
        next(stream)


def test_requests_beyond_the_queue_are_refused_at_once(small: Engine) -> None:
    with busy(small._scheduler):
        streams = [small.stream(tiny.prompt(), max_new_tokens=2, plan=Plan("full")) for _ in range(2)]
        with pytest.raises(ResourceExhausted, match="2 requests wait"):
            small.stream(tiny.prompt(), max_new_tokens=2, plan=Plan("full"))
    assert all(len(list(stream)) == 3 for stream in streams)


def test_a_comparison_is_run_beside_others(small: Engine) -> None:
    prompt = Prompt([Chunk(tiny.random_ids(60, 1)), Text(tiny.random_ids(9, 2))])
    small.precompute(tiny.chunks_of(prompt))
    with busy(small._scheduler):
        streams = [
            small.stream(prompt, max_new_tokens=5, plan=Plan("reuse"), compare_full=True, positions=True)
            for _ in range(2)
        ]
    for stream in streams:
        *_, last = stream
        assert isinstance(last, Answer)
        assert last.report.comparison is not None
        assert last.report.recomputed_positions is not None

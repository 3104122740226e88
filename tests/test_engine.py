"""The engine's public face: inputs it refuses, streams, threads, upkeep."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blend import Answer, Chunk, Engine, EngineConfig, Plan, Prompt, StoreConfig, Text, Token
from blend.errors import Closed, InvalidConfig, InvalidInput, InvalidPlan, InvalidPrompt, ModelError, PromptTooLong
from blend.recompute.kernels import cpu
from blend.serving.passes import Part, Passes
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path / "store") as made:
        yield made


def test_a_stream_ends_with_the_answer_that_generate_gives(engine: Engine) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    *tokens, last = engine.stream(prompt, max_new_tokens=9, plan=Plan("query", 0.2))
    want = engine.generate(prompt, max_new_tokens=9, plan=Plan("query", 0.2))
    assert isinstance(last, Answer)
    assert all(isinstance(t, Token) for t in tokens)
    assert tuple(t.token_id for t in tokens if isinstance(t, Token)) == last.token_ids == want.token_ids
    assert last.finish_reason == want.finish_reason
    assert last.report.mode == "query"


class Read(TorchDispatchMode):
    """Counts the numbers that are read out of tensors: each of them is waited for, if the tensor is a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_of_decoded_tokens_nothing_is_read_but_all_their_ids_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = engine.prefill(tiny.prompt(), Plan("full"), reserve=4)
    run, read = Passes.run, Read()

    def watched(passes: Passes, parts: Sequence[Part]) -> Any:
        with read:
            return run(passes, parts)

    monkeypatch.setattr(Passes, "run", watched)
    assert len(engine.greedy(prefill, 5)) == 5
    assert read.count == 0, "numbers one by one; ids come as a list"


def test_greedy_tokens_are_those_of_stock_generation(engine: Engine, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = tiny.prompt()
    stock = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = torch.tensor([prompt.token_ids])
    want = stock.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    got = engine.generate(prompt, max_new_tokens=12, plan=Plan("full"))
    assert list(got.token_ids) == [t for t in want if t != 2]
    assert got.finish_reason == ("stop" if 2 in want else "length")


def test_an_end_token_stops_and_is_not_part_of_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny.prompt()
    free = engine.generate(prompt, max_new_tokens=6, plan=Plan("full")).token_ids
    end = free[3]
    monkeypatch.setattr(type(engine.tokenizer), "eos_ids", property(lambda self: frozenset({end})))
    got = engine.generate(prompt, max_new_tokens=6, plan=Plan("full"))
    assert got.finish_reason == "stop"
    assert got.token_ids == free[: free.index(end)]


def test_a_stream_that_is_dropped_leaves_the_engine_usable(engine: Engine) -> None:
    stream = engine.stream(tiny.prompt(), max_new_tokens=50, plan=Plan("full"))
    next(iter(stream))
    engine.generate(tiny.prompt(seed=5), max_new_tokens=2, plan=Plan("full"))
    stream.close()
    assert list(stream) == []
    assert engine.generate(tiny.prompt(seed=6), max_new_tokens=2, plan=Plan("full")).token_ids


def test_streams_may_interleave_and_keep_their_own_answers(engine: Engine) -> None:
    prompts = [tiny.prompt(seed=s) for s in range(3)]
    alone = [engine.generate(p, max_new_tokens=6, plan=Plan("full")).token_ids for p in prompts]
    streams = [engine.stream(p, max_new_tokens=6, plan=Plan("full")) for p in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    running = dict(enumerate(streams))
    while running:
        for i, stream in list(running.items()):
            event = next(stream)
            if isinstance(event, Answer):
                del running[i]
            else:
                found[i].append(event.token_id)
    assert [tuple(f) for f in found] == alone


def test_many_threads_get_what_they_would_get_alone(engine: Engine) -> None:
    prompts = [tiny.prompt(seed=s) for s in range(4)]
    for p in prompts:
        engine.precompute(tiny.chunks_of(p))
    plan = Plan("query", 0.3)
    alone = [engine.generate(p, max_new_tokens=4, plan=plan).token_ids for p in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        found[i] = engine.generate(prompts[i % 4], max_new_tokens=4, plan=plan).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert [found[i] for i in range(8)] == alone * 2


def test_a_prompt_without_room_for_its_answer(engine: Engine) -> None:
    limit = engine.decoder.max_positions
    prompt = Prompt([Text(tiny.random_ids(limit - 4, 1))])
    assert len(engine.generate(prompt, max_new_tokens=4, plan=Plan("full")).token_ids) <= 4
    with pytest.raises(PromptTooLong, match=f"{limit + 1} tokens.*at most {limit}"):
        engine.generate(prompt, max_new_tokens=5)
    with pytest.raises(PromptTooLong):
        engine.precompute([Chunk(tiny.random_ids(limit, 1))])


def test_bad_input_is_refused_at_once_and_named(engine: Engine) -> None:
    prompt = tiny.prompt()
    with pytest.raises(InvalidPlan, match="method.*quarry.*query"):
        engine.stream(prompt, plan=Plan("quarry"))
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        engine.stream(prompt, max_new_tokens=0)
    with pytest.raises(InvalidInput, match="namespace"):
        engine.stream(prompt, namespace="")
    with pytest.raises(InvalidPrompt, match="260"):
        engine.prefill(Prompt([Text((1, 260))]))
    with pytest.raises(InvalidPrompt, match="260"):
        engine.precompute([Chunk((260,))])
    with pytest.raises(InvalidPrompt):
        engine.score(prompt, [])
    with pytest.raises(InvalidInput, match="behind"):
        engine.precompute([Chunk((5,))], behind=[])
    with pytest.raises(InvalidPrompt):
        engine.prefill("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match="plan"):
        engine.prefill(prompt, "full")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="reserve"):
        engine.prefill(prompt, reserve=-1)
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        engine.greedy(engine.prefill(prompt, reserve=3), 5)
    with pytest.raises(InvalidPrompt, match="chunks"):
        engine.precompute([None])  # type: ignore[list-item]


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), 10**400, "0.1", True])
def test_a_ratio_outside_0_to_1_is_refused(ratio: object) -> None:
    with pytest.raises(InvalidPlan, match="ratio"):
        Plan("query", ratio=ratio)  # type: ignore[arg-type]


def test_empty_things_are_refused() -> None:
    none: Any = None
    for make in (
        lambda: Chunk([]),
        lambda: Text([]),
        lambda: Prompt([]),
        lambda: Chunk([-1]),
        lambda: Chunk(none),
        lambda: Prompt(none),
    ):
        with pytest.raises(InvalidPrompt):
            make()
    for wrong in (
        {"method": "auto", "ratio": 0.3},
        {"method": "reuse", "ratio": 0.3},
        {"method": "full", "max_charged": 0.1},
        {"method": "query", "max_kl": 0.1},
    ):
        with pytest.raises(InvalidPlan, match="none with (a named )?method"):
            Plan(**wrong)  # type: ignore[arg-type]
    for value in (1.7, True, "a"):
        with pytest.raises(InvalidPrompt, match="token id"):
            Chunk([value])  # type: ignore[list-item]
    with pytest.raises(InvalidPlan):
        Plan(variant="other")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "tpu"},
        {"dtype": "int4"},
        {"sink": "eos"},
        {"max_rows": 0},
        {"threads": 0},
        {"threads": 10**12},
        {"model": ""},
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(settings))):
        EngineConfig(**settings)  # type: ignore[arg-type]


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-model"):
        Engine(EngineConfig(model=str(tmp_path / "no-model")))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": "x"},
        {"max_position_embeddings": None},
        {"max_position_embeddings": -1},
        {"rope_parameters": {"rope_type": "zzz", "rope_theta": 1e4}},
    ],
)
def test_a_configuration_that_does_not_fit_the_weights_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    model = tiny.save_model(tmp_path / "model")
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelError):
        tiny.engine(model, tmp_path / "store")


def test_a_closed_engine_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SHARED_NBYTES", 0)  # so that a second thread places chunks
    before = set(threading.enumerate())
    engine = tiny.engine(model, tmp_path)
    engine.precompute(tiny.chunks_of(tiny.prompt()))
    engine.generate(tiny.prompt(), max_new_tokens=1, plan=Plan("reuse"))
    stream = engine.stream(tiny.prompt(), max_new_tokens=800, plan=Plan("full"))
    next(stream)
    assert "placing" in {thread.name for thread in threading.enumerate()}
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.generate(tiny.prompt())
    with pytest.raises(Closed):
        list(stream)
    assert set(threading.enumerate()) <= before, "its own threads have ended"


def test_a_missed_chunk_is_there_the_next_time(model: Path, tmp_path: Path) -> None:
    prompt = tiny.prompt()
    with tiny.engine(model, tmp_path, recompute_misses=True) as engine:
        first = engine.prefill(prompt, Plan("query", 0.2)).report
        assert {c.outcome for c in first.chunks} == {"miss"}
        assert engine.wait_idle(60)
        second = engine.prefill(prompt, Plan("query", 0.2)).report
        assert {c.outcome for c in second.chunks} == {"hit"}


def test_missed_chunks_are_dropped_once_background_work_has_stopped(model: Path, tmp_path: Path) -> None:
    prompt = tiny.prompt(2)
    with tiny.engine(model, tmp_path / "store", recompute_misses=True) as engine:
        engine.stop_background()
        engine.prefill(prompt, Plan("reuse"))
        assert engine.wait_idle(10)
        assert engine.stats().background == {"done": 0, "failed": 0, "dropped": 2, "joined": 0, "waiting": 0}
        engine.precompute(tiny.chunks_of(prompt))
        assert engine.missing(tiny.chunks_of(prompt)) == []


def test_what_was_forgotten_does_not_come_back(model: Path, tmp_path: Path) -> None:
    """A miss of a request that was under way when its chunks were deleted must not store them again."""
    prompt = tiny.prompt()
    chunks = tiny.chunks_of(prompt)
    with tiny.engine(model, tmp_path, recompute_misses=True) as engine:
        queued = engine.generate(prompt, max_new_tokens=1, plan=Plan("reuse"))
        engine.forget(chunks)
        assert engine.wait_idle(60)
        assert engine.missing(chunks) == chunks, "queued before, dropped by forget"

        stream = engine.stream(prompt, max_new_tokens=3, plan=Plan("reuse"))
        engine.forget(chunks)
        assert list(stream)[-1].token_ids[:1] == queued.token_ids  # type: ignore[union-attr]
        assert engine.wait_idle(60)
        assert engine.missing(chunks) == chunks, "arrived before, not queued"

        engine.generate(prompt, max_new_tokens=1, plan=Plan("reuse"))
        assert engine.wait_idle(60)
        assert engine.missing(chunks) == [], "arrived afterwards: an ordinary miss"


def test_chunks_are_forgotten_by_key_whatever_model_made_them(model: Path, tmp_path: Path) -> None:
    chunks = tiny.chunks_of(tiny.prompt())
    with tiny.engine(model, tmp_path) as engine:
        keys = engine.precompute(chunks)
    with tiny.engine(model, tmp_path, dtype="bfloat16") as engine:
        assert engine.forget(chunks) == 0
        assert engine.forget_keys(keys) == 3
    with tiny.engine(model, tmp_path) as engine:
        assert engine.missing(chunks) == chunks


def test_settling_for_full_prefill_uses_no_chunk(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    point = {"method": "query", "ratio": 0.15, "charged": 0.15, "kl": 0.01, "kl_low": 0.0, "kl_high": 0.02, "top1": 1.0}
    file = {"version": 1, "model": "m", "data": "made up", "questions": 1, "default": point, "points": [point]}
    (model / "blend_calibration.json").write_text(json.dumps(file))
    prompt = tiny.prompt(question=120)
    with tiny.engine(model, tmp_path / "store") as engine:
        engine.precompute(tiny.chunks_of(prompt))
        got = engine.prefill(prompt)
        want = engine.prefill(prompt, Plan("full")).logits
    report = got.report
    assert (report.mode, report.cached, report.selected, report.charged_ratio) == ("full", 0, 0, 1.0)
    assert {(c.outcome, c.tier) for c in report.chunks} == {("unused", "host")}
    assert not any(c.nbytes for c in report.chunks), "it was known before they were read"
    assert (got.logits - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


def test_auto_without_calibration_runs_full_and_a_named_method_warns(engine: Engine) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    report = engine.prefill(prompt).report
    assert (report.mode, report.charged_ratio) == ("full", 1.0)
    assert "calibration" in report.reason
    assert {c.outcome for c in report.chunks} == {"unused"}
    assert any("calibration" in w for w in engine.prefill(prompt, Plan("query")).report.warnings)


def test_a_report_tells_when_each_part_was(engine: Engine) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    begin = perf_counter()
    report = engine.prefill(prompt, Plan("query", 0.2)).report
    end = perf_counter()
    assert {phase.name for phase in report.phases} == {"queue", "lookup", "fetch", "rotate", "select", "recompute"}
    assert all(begin <= phase.start <= phase.end <= end for phase in report.phases)
    layers = [phase.layer for phase in report.phases if phase.name == "rotate"]
    assert layers == list(range(engine.decoder.layers))
    turned = sum(phase.end - phase.start for phase in report.phases if phase.name == "rotate")
    assert turned * 1e3 == pytest.approx(report.timings.rotate)


def test_two_engines_share_a_directory(model: Path, tmp_path: Path) -> None:
    prompt = tiny.prompt()
    with tiny.engine(model, tmp_path) as one, tiny.engine(model, tmp_path) as two:
        one.precompute(tiny.chunks_of(prompt))
        report = two.prefill(prompt, Plan("reuse")).report
        assert {(c.outcome, c.tier) for c in report.chunks} == {("hit", "disk")}


def test_a_store_of_host_memory_alone_and_none_at_all(model: Path, tmp_path: Path) -> None:
    prompt = tiny.prompt()
    host = StoreConfig(host_bytes=64 << 20, disk_bytes=0, directory=tmp_path)
    with tiny.engine(model, tmp_path, store=host) as engine:
        engine.precompute(tiny.chunks_of(prompt))
        assert {c.tier for c in engine.prefill(prompt, Plan("reuse")).report.chunks} == {"host"}
    with pytest.raises(InvalidConfig, match="host_bytes"):
        StoreConfig(host_bytes=0, disk_bytes=0)


def test_stats_count_requests_and_chunks(engine: Engine) -> None:
    prompt = tiny.prompt()
    engine.precompute(tiny.chunks_of(prompt))
    engine.generate(prompt, max_new_tokens=2, plan=Plan("query", 0.2))
    stats = engine.stats().as_dict()
    assert stats["counters"]["requests"] == 1
    assert stats["counters"]["precomputed"] == 3
    assert stats["counters"]["chunks_hit"] == 3
    assert stats["counters"]["modes"] == {"query": 1}
    assert stats["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4
    assert [t["name"] for t in stats["tiers"]] == ["host", "disk"]
    assert all(t["objects"] == 3 for t in stats["tiers"])

"""Layer by layer from the store to the canvas: overlap with compute, waits, losses in mid-flight, prefetch policies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Chunk, Engine, Plan, Prefill, Prompt, StoreConfig, Text, filling
from blend.errors import ResourceExhausted
from blend.recompute import assemble
from blend.recompute.canvas import Canvas
from blend.store import DiskTier, FileIO, LoadingLease
from blend.store.loading import Loads
from tests import tiny
from tests.recompute.simulated import SimulatedStreams, late
from tests.serving.fakes import busy

METHODS = [Plan("reuse"), Plan("random", 0.2), Plan("head", 0.2), Plan("deviation", 0.2), Plan("query", 0.2)]
MIB = 1 << 20


class HeldIO(FileIO):
    """Reads of payloads are counted, and wait while they are held."""

    def __init__(self) -> None:
        self.reads = 0
        self._steps = threading.Semaphore(1_000_000)

    def hold(self) -> None:
        self._steps = threading.Semaphore(0)

    def go(self, reads: int = 1_000_000) -> None:
        self._steps.release(reads)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        if offset >= 4096:
            assert self._steps.acquire(timeout=60)
            self.reads += 1
        return super().pread(fd, into, offset)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldIO]:
    io = HeldIO()
    monkeypatch.setattr("blend.store.factory.DiskTier", partial(DiskTier, io=io))
    yield io
    io.go()


@pytest.fixture
def opened(model: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Opens engines on the test's one directory, with changed store settings."""
    made: list[Engine] = []

    def open_engine(kernels: str = "auto", **changes: Any) -> Engine:
        settings = {"host_bytes": 64 * MIB, "disk_bytes": 256 * MIB, "directory": tmp_path / "store", "fsync": False}
        engine = tiny.engine(model, tmp_path / "store", store=StoreConfig(**{**settings, **changes}), kernels=kernels)
        made.append(engine)
        return engine

    yield open_engine
    for engine in made:
        engine.close()


def stored(opened: Callable[..., Engine], prompt: Prompt, *without: int) -> None:
    """Put the prompt's chunks on disk, all but some, and nowhere else."""
    chunks = [chunk for i, chunk in enumerate(tiny.chunks_of(prompt)) if i not in without]
    engine = opened()
    engine.precompute(chunks)
    engine.close()


def outcomes(prefill: Prefill) -> list[str]:
    return [chunk.outcome for chunk in prefill.report.chunks]


def corrupt(directory: Path, engine: Engine, chunk: Chunk, back: int = 100) -> None:
    """Flip a bit of a chunk's file, so many bytes before its end: by default in its last layer."""
    (path,) = [p for p in directory.rglob("*") if p.is_file() and p.name.startswith(engine.content_key(chunk))]
    raw = bytearray(path.read_bytes())
    raw[-back] ^= 0x40
    path.write_bytes(raw)


@pytest.mark.parametrize("plan", METHODS, ids=lambda plan: plan.method)
def test_what_is_loaded_is_what_was_there(opened: Callable[..., Engine], plan: Plan) -> None:
    first, *_ = tiny.chunks_of(tiny.prompt())
    prompt = Prompt([*tiny.prompt().segments[:-1], first, tiny.prompt().segments[-1]])  # one chunk twice
    warm = opened()
    warm.precompute(tiny.chunks_of(prompt))
    want = warm.prefill(prompt, plan)
    assert {chunk.tier for chunk in want.report.chunks} == {"host"}
    warm.close()
    cold = opened()
    got = cold.prefill(prompt, plan)
    assert {chunk.tier for chunk in got.report.chunks} == {"disk"}
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.canvas.k, want.canvas.k)
    assert torch.equal(got.canvas.v, want.canvas.v)
    assert got.report.chunks[-1].nbytes == 0, "it was read once"
    assert cold.store.wait_idle(30)
    again = cold.prefill(prompt, plan)
    assert {chunk.tier for chunk in again.report.chunks} == {"host"}, "what was loaded is in the host tier now"
    assert torch.equal(again.logits, want.logits)


@pytest.mark.parametrize("plan", METHODS, ids=lambda plan: plan.method)
def test_a_layer_is_used_before_the_next_one_is_read(
    opened: Callable[..., Engine], held: HeldIO, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    prompt = tiny.prompt(chunks=3)
    stored(opened, prompt)
    engine = opened()
    begun = threading.Event()
    needed: list[tuple[int, int]] = []
    need = Canvas.need

    def noted(canvas: Canvas, layer: int) -> None:
        need(canvas, layer)
        if canvas.length == len(prompt):
            needed.append((layer, held.reads))
            begun.set()

    monkeypatch.setattr(Canvas, "need", noted)
    held.hold()
    held.reads = 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.prefill, prompt, plan)
        held.go(3)  # layer 0 of each chunk, and not one more
        assert begun.wait(60)
        assert needed[0] == (0, 3)
        held.go()
        assert outcomes(running.result(60)) == ["hit"] * 3


def test_waiting_for_the_store_holds_nobody_up(opened: Callable[..., Engine], held: HeldIO) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened()
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.prefill, prompt, Plan("reuse"))
        for seed in (7, 8):
            assert engine.generate(tiny.prompt(seed=seed), max_new_tokens=2, plan=Plan("full")).token_ids
        assert not waiting.done()
        held.go()
        assert outcomes(waiting.result(60)) == ["hit"] * 2


def pulled(monkeypatch: pytest.MonkeyPatch, engine: Engine, chunks: list[Chunk]) -> None:
    """Let layer 2 of these chunks fail, one chunk an attempt."""
    good, doomed = filling._Source.layer, [engine.content_key(chunk) for chunk in chunks]

    def layer(source: filling._Source, number: int) -> torch.Tensor:
        if number == 2 and doomed and source.wanted.content == doomed[0]:
            doomed.pop(0)
            raise filling.ChunkLost(source.wanted, "the cable was pulled")
        return good(source, number)

    monkeypatch.setattr(filling._Source, "layer", layer)


@pytest.mark.parametrize("fault", ["bad bytes", "pulled cable"])
@pytest.mark.parametrize("plan", METHODS, ids=lambda plan: plan.method)
def test_a_chunk_lost_in_mid_flight_answers_as_if_it_were_absent(
    opened: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, fault: str
) -> None:
    prompt = tiny.prompt(chunks=3)
    stored(opened, prompt, 1)
    absent = opened()
    want = absent.prefill(prompt, plan)
    assert outcomes(want) == ["hit", "miss", "hit"]
    absent.close()
    stored(opened, prompt)
    engine = opened()
    if fault == "bad bytes":  # noticed before or after work has begun: both are right
        corrupt(tmp_path, engine, tiny.chunks_of(prompt)[1])
    else:
        pulled(monkeypatch, engine, tiny.chunks_of(prompt)[1:2])
    got = engine.prefill(prompt, plan)
    assert outcomes(got) == ["hit", "failed", "hit"]
    assert ("checksum" if fault == "bad bytes" else "cable") in got.report.chunks[1].reason
    if fault == "pulled cable":
        assert any("planned again" in warning for warning in got.report.warnings)
    assert torch.equal(got.logits, want.logits)
    assert got.report.charged_ratio == want.report.charged_ratio


def test_two_chunks_lost_one_after_another_end_in_full_prefill(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt(chunks=3)
    stored(opened, prompt)
    engine = opened()
    pulled(monkeypatch, engine, tiny.chunks_of(prompt)[:2])
    got = engine.prefill(prompt, Plan("query", 0.2))
    want = engine.prefill(prompt, Plan("full"))
    assert torch.equal(got.logits, want.logits)
    assert got.report.mode == "full"
    assert "the cable was pulled" in got.report.reason
    assert got.report.charged_ratio == 1.0
    assert sum("planned again" in warning for warning in got.report.warnings) == 2
    assert engine.stats().counters["replanned"] == 2


def test_a_chunk_whose_first_layer_is_bad_needs_no_second_plan(opened: Callable[..., Engine], tmp_path: Path) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened()
    chunk = tiny.chunks_of(prompt)[0]
    nbytes = len(chunk) * engine.stats().kv_bytes_per_token
    corrupt(tmp_path, engine, chunk, back=nbytes - 10)
    got = engine.prefill(prompt, Plan("reuse"))
    assert outcomes(got) == ["failed", "hit"]
    assert not any("planned again" in warning for warning in got.report.warnings)


def test_a_layer_that_stops_coming_is_given_up(
    opened: Callable[..., Engine], held: HeldIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt(chunks=1)
    stored(opened, prompt)
    engine = opened()
    monkeypatch.setattr(filling, "_LAYER_SECONDS", 0.1)
    held.hold()
    held.go(1)  # the first layer, and nothing after it
    got = engine.prefill(prompt, Plan("reuse"))
    assert outcomes(got) == ["failed"]
    assert "in time" in got.report.chunks[0].reason
    assert torch.allclose(got.logits, engine.prefill(prompt, Plan("full")).logits, atol=1e-4)


def test_a_chunk_that_fails_while_its_request_queues_is_a_miss(
    opened: Callable[..., Engine], held: HeldIO, tmp_path: Path
) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened()
    corrupt(tmp_path, engine, tiny.chunks_of(prompt)[0])
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(engine.prefill, prompt, Plan("reuse"))
        while not engine.store.load_stats().inflight_bytes:
            time.sleep(0.005)
        with busy(engine._scheduler):
            held.go()
            assert engine.store.wait_idle(30)
    got = queued.result(60)
    assert outcomes(got) == ["failed", "hit"]
    assert not any("planned again" in warning for warning in got.report.warnings)


def test_what_is_forgotten_while_it_waits_to_be_written_stays_away(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Chunk(tiny.random_ids(40, 1))
    engine = opened(host_bytes=4096)  # too small for it: it waits in memory of its own
    written, go = threading.Event(), threading.Event()
    put = type(engine.store._writing)._with_retries

    def slow(*args: Any) -> bool:
        written.set()
        assert go.wait(60)
        return put(*args)

    monkeypatch.setattr(type(engine.store._writing), "_with_retries", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.precompute, [chunk])
        assert written.wait(60)
        engine.forget([chunk])
        go.set()
        first.result(60)
    assert engine.missing([chunk]) == [chunk]
    engine.precompute([chunk])
    assert engine.missing([chunk]) == []


def test_best_effort_takes_what_is_there(opened: Callable[..., Engine], held: HeldIO) -> None:
    prompt = tiny.prompt(chunks=3)
    stored(opened, prompt)
    engine = opened(prefetch_policy="best_effort")
    held.hold()
    got = engine.prefill(prompt, Plan("reuse"))
    assert outcomes(got) == ["miss"] * 3
    assert "in time" in got.report.chunks[0].reason
    assert torch.allclose(got.logits, engine.prefill(prompt, Plan("full")).logits, atol=1e-4)


def test_a_time_out_is_kept_and_leaves_late_chunks_to_be_computed(opened: Callable[..., Engine], held: HeldIO) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened(prefetch_policy="timeout", prefetch_base_ms=30.0, prefetch_ms_per_ki_token=0.0)
    held.hold()
    assert outcomes(engine.prefill(prompt, Plan("reuse"))) == ["miss"] * 2
    held.go()
    assert engine.store.wait_idle(30)
    long = opened(prefetch_policy="timeout", prefetch_base_ms=60_000.0)
    assert outcomes(long.prefill(prompt, Plan("reuse"))) == ["hit"] * 2


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_lease_that_ends_while_it_is_used_costs_no_answer(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened(lease_seconds=0.02)
    if where == "host":
        engine.precompute(tiny.chunks_of(prompt))
        engine.prefill(prompt, Plan("reuse"))
        assert engine.store.wait_idle(30)
    need = Canvas.need

    def slow(canvas: Canvas, layer: int) -> None:
        if canvas.length == len(prompt):
            time.sleep(0.03)
        need(canvas, layer)

    want = engine.prefill(prompt, Plan("full"))
    monkeypatch.setattr(Canvas, "need", slow)
    got = engine.prefill(prompt, Plan("reuse"))
    if where == "host":
        assert outcomes(got) == ["hit"] * 2
    for outcome in outcomes(got):
        assert outcome in ("hit", "failed", "unused")
    if "hit" not in outcomes(got):
        assert torch.allclose(got.logits, want.logits, atol=1e-4)


def test_loading_needs_no_host_tier(opened: Callable[..., Engine]) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened(host_bytes=0)
    for _ in range(2):
        got = engine.prefill(prompt, Plan("reuse"))
        assert [(chunk.outcome, chunk.tier) for chunk in got.report.chunks] == [("hit", "disk")] * 2


def test_precomputed_chunks_are_durable(opened: Callable[..., Engine]) -> None:
    chunks = [Chunk(tiny.random_ids(20, seed)) for seed in range(8)]
    engine = opened()
    engine.precompute(chunks)
    _, disk = engine.store.tiers
    assert {key.content for key in list(disk.keys())} == {engine.content_key(chunk) for chunk in chunks}
    assert engine.store.write_stats().waiting == 0


def test_precompute_says_so_when_no_tier_takes_a_chunk(opened: Callable[..., Engine]) -> None:
    engine = opened(host_bytes=4096, disk_bytes=4096)
    with pytest.raises(ResourceExhausted):
        engine.precompute([Chunk(tiny.random_ids(40, 1))])


def test_a_canvas_is_filled_once_in_order() -> None:
    canvas = Canvas(3, 1, 4, 2, torch.float32, torch.device("cpu"))
    seen: list[int] = []
    canvas.fill_by(seen.append)
    canvas.need(1)
    canvas.need(0)
    assert seen == [0, 1]
    canvas.need(2)
    canvas.need(2)
    assert seen == [0, 1, 2]


def test_what_filling_raises_reaches_the_caller_and_leaves_the_layer_to_be_filled() -> None:
    canvas = Canvas(2, 1, 4, 2, torch.float32, torch.device("cpu"))
    seen: list[int] = []

    def fill(layer: int) -> None:
        seen.append(layer)
        if len(seen) == 2:
            raise RuntimeError("gone")

    canvas.fill_by(fill)
    with pytest.raises(RuntimeError, match="gone"):
        canvas.need(1)
    canvas.need(1)
    assert seen == [0, 1, 1]
    assert canvas.fill_ms > 0


def test_text_alone_needs_no_store(opened: Callable[..., Engine]) -> None:
    prompt = Prompt([Text(tiny.random_ids(9, 1))])
    assert opened().prefill(prompt, Plan("reuse")).report.chunks == ()


@pytest.fixture(params=[True, False], ids=["pinned", "staged"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedStreams:
    """A device that copies as late as it may, for engines on the reference kernels. When memory of the store is let go
    of, nothing may be under way from it."""
    streams = SimulatedStreams(late("copy"), lambda _: request.param, eager=True)
    close = Loads.close

    def closed(loads: Loads) -> None:
        assert streams.copies_left == 0, "memory that is still copied was let go of"
        close(loads)

    monkeypatch.setattr(assemble, "streams_for", lambda _: streams)
    monkeypatch.setattr(Loads, "close", closed)
    return streams


@pytest.mark.parametrize("plan", METHODS, ids=lambda plan: plan.method)
def test_a_device_that_copies_late_answers_alike(
    opened: Callable[..., Engine], device: SimulatedStreams, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    prompt = tiny.prompt(chunks=3)
    stored(opened, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "streams_for", lambda _: SimulatedStreams(late("compute"), eager=True))
        want = opened("reference").prefill(prompt, plan)
    engine = opened("reference")
    for tier in ("disk", "host"):
        before = device.copies
        got = engine.prefill(prompt, plan)
        assert {chunk.tier for chunk in got.report.chunks} == {tier}
        assert torch.equal(got.logits, want.logits)
        assert torch.equal(got.canvas.k, want.canvas.k)
        assert device.copies - before == 3 * got.canvas.layers
        assert engine.store.wait_idle(30)


def test_the_next_layer_s_copy_starts_when_a_layer_is_placed(
    opened: Callable[..., Engine], device: SimulatedStreams, held: HeldIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened("reference")
    started: list[tuple[int, int]] = []
    need = Canvas.need

    def noted(canvas: Canvas, layer: int) -> None:
        need(canvas, layer)
        if canvas.length == len(prompt):
            started.append((layer, device.copies))
            if layer == 1:
                held.go()  # only now the other layers come
                while not all(lease.complete for lease in loading):
                    time.sleep(0.005)

    loading: list[LoadingLease] = []
    begin = LoadingLease.begin

    def begun(lease: LoadingLease) -> None:
        loading.append(lease)
        begin(lease)

    monkeypatch.setattr(Canvas, "need", noted)
    monkeypatch.setattr(LoadingLease, "begin", begun)
    held.hold()
    held.go(4)  # layers 0 and 1 of both
    assert outcomes(engine.prefill(prompt, Plan("reuse"))) == ["hit"] * 2
    assert started[1:] == [(1, 4), (2, 8), (3, 8)], "what has not come is not waited for ahead of time"


@pytest.mark.parametrize("method", ["reuse", "query"])
def test_a_chunk_lost_in_mid_flight_leaves_nothing_on_its_way(
    opened: Callable[..., Engine], device: SimulatedStreams, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    prompt, plan = tiny.prompt(chunks=3), Plan(method, 0.2 if method == "query" else None)
    stored(opened, prompt, 1)
    absent = opened("reference")
    want = absent.prefill(prompt, plan)
    absent.close()
    stored(opened, prompt)
    engine = opened("reference")
    pulled(monkeypatch, engine, tiny.chunks_of(prompt)[1:2])
    got = engine.prefill(prompt, plan)
    assert outcomes(got) == ["hit", "failed", "hit"]
    assert torch.equal(got.logits, want.logits)
    assert device.copies_left == 0


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_a_layer_is_placed_leaves_nothing_on_its_way(
    opened: Callable[..., Engine],
    device: SimulatedStreams,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
) -> None:
    prompt = tiny.prompt(chunks=2)
    stored(opened, prompt)
    engine = opened("reference")
    need = Canvas.need

    def failing(canvas: Canvas, layer: int) -> None:
        need(canvas, layer)
        if layer == 1 and canvas.length == len(prompt):
            assert device.copies_left, "the next layer is on its way"
            raise kind("the device is out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Canvas, "need", failing)
        with pytest.raises(kind):
            engine.prefill(prompt, Plan("reuse"))
    assert device.copies_left == 0
    assert outcomes(engine.prefill(prompt, Plan("reuse"))) == ["hit"] * 2

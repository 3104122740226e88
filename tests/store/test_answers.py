"""What a fault in the store does to an answer: it is the one that the same plan gives with that chunk absent."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blend import Chunk, Engine, Plan, Prompt, StoreConfig
from blend.errors import Closed, ResourceExhausted, StoreError, TierUnavailable
from blend.store import FileIO, Header, ObjectKey
from tests import tiny

PLAN = Plan("query", ratio=0.2)
MB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def on_disk(model: Path, directory: Path, **settings: object) -> Engine:
    """An engine whose chunks come from disk each time."""
    config = dict(host_bytes=0, disk_bytes=256 * MB, directory=directory, fsync=False)
    return tiny.engine(model, directory, store=StoreConfig(**{**config, **settings}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return tiny.prompt(chunks=3)


@pytest.fixture(scope="module")
def absent(model: Path, prompt: Prompt, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Logits with the middle chunk not stored."""
    first, _, last = tiny.chunks_of(prompt)
    with on_disk(model, tmp_path_factory.mktemp("absent")) as engine:
        engine.precompute([first, last])
        return engine.prefill(prompt, PLAN).logits


@pytest.fixture(scope="module")
def full(model: Path, prompt: Prompt, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Logits with nothing stored."""
    with on_disk(model, tmp_path_factory.mktemp("full")) as engine:
        return engine.prefill(prompt, PLAN).logits


def file_of(directory: Path, engine: Engine, chunk: Chunk) -> Path:
    name = f"{engine.content_key(chunk)}.plain"
    (path,) = [path for path in directory.rglob(name) if path.is_file()]
    return path


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["disk", "host and disk"])
def test_every_region_of_a_chunks_file(
    model: Path, prompt: Prompt, absent: torch.Tensor, tmp_path: Path, tiers: str
) -> None:
    """Header, token ids, checksums, K and V of each layer; and the file cut off, empty or another chunk's."""
    middle = tiny.chunks_of(prompt)[1]
    room = 0 if tiers == "disk" else 64 * MB
    with on_disk(model, tmp_path, host_bytes=room) as engine:
        engine.precompute(tiny.chunks_of(prompt))
        whole = engine.prefill(prompt, PLAN).logits
        assert not torch.equal(whole, absent)
        path = file_of(tmp_path, engine, middle)
        raw = path.read_bytes()
        lease = engine.store.get(ObjectKey(engine.content_key(middle), "plain"))
        assert lease is not None
        with lease:
            header = lease.header
        half = header.layer_nbytes // 2
        places = [
            0,
            9,
            13,
            17,
            30,
            60,
            80,
            93,
            105,
            120,
            145,
            151,
            153,
            153 + 4 * header.tokens - 1,
            header.header_nbytes - 1,
        ]
        for layer in range(header.layers):
            start, nbytes = header.layer_range(layer)
            places += [start, start + half - 1, start + half, start + nbytes - 1]
        wrong = [raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :] for at in places]
        wrong += [b"", raw[:100], raw[:4096], raw[:-1], raw + b"\0"]
        wrong += [file_of(tmp_path, engine, tiny.chunks_of(prompt)[0]).read_bytes()]
        for data in wrong:
            path.write_bytes(data)
            for tier in engine.store.tiers[:-1]:
                tier.remove(ObjectKey(header.key.content, "plain"))
            for outcome in ("failed", "miss"):
                got = engine.prefill(prompt, PLAN)
                assert [chunk.outcome for chunk in got.report.chunks] == ["hit", outcome, "hit"]
                assert got.report.chunks[1].reason
                assert torch.equal(got.logits, absent)
            engine.precompute([middle])
            assert path.read_bytes()[: header.header_nbytes][153:] == raw[: header.header_nbytes][153:]
            assert torch.equal(engine.prefill(prompt, PLAN).logits, whole)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_disk_that_fails_to_read(
    model: Path,
    prompt: Prompt,
    full: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    with on_disk(model, tmp_path) as engine:
        engine.precompute(tiny.chunks_of(prompt))
        whole = engine.prefill(prompt, PLAN)
        with monkeypatch.context() as patch:
            patch.setattr(FileIO, call, _raising(code))
            got = engine.prefill(prompt, PLAN)
        assert {chunk.outcome for chunk in got.report.chunks} == {"failed"}
        assert all(errno.errorcode[code] in chunk.reason for chunk in got.report.chunks)
        assert torch.equal(got.logits, full)
        again = engine.prefill(prompt, PLAN)
        assert {chunk.outcome for chunk in again.report.chunks} == {"hit"}
        assert torch.equal(again.logits, whole.logits)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("call", ["pwrite", "rename", "truncate"])
def test_a_disk_that_fails_to_write(
    model: Path,
    prompt: Prompt,
    full: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    """Alone it is a typed error and the answer is full prefill's; below a host tier it costs nothing but the copy."""
    chunks = tiny.chunks_of(prompt)
    with on_disk(model, tmp_path / "alone") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FileIO, call, _raising(code))
            with pytest.raises(TierUnavailable, match=errno.errorcode[code]):
                engine.precompute(chunks)
            got = engine.prefill(prompt, PLAN)
        assert torch.equal(got.logits, full)
        assert engine.missing(chunks) == chunks
        engine.precompute(chunks)
        whole = engine.prefill(prompt, PLAN).logits
    with on_disk(model, tmp_path / "below", host_bytes=64 * MB) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FileIO, call, _raising(code))
            engine.precompute(chunks)
            got = engine.prefill(prompt, PLAN)
        assert {(chunk.outcome, chunk.tier) for chunk in got.report.chunks} == {("hit", "host")}
        assert torch.equal(got.logits, whole)


def _raising(code: int):  # type: ignore[no-untyped-def]
    def fails(*_: object) -> None:
        raise OSError(code, "for this test")

    return fails


@pytest.mark.parametrize("forgery", ["namespace", "tokens", "layers", "kv_heads", "dtype"])
def test_an_object_that_only_claims_the_key_is_refused(
    model: Path, prompt: Prompt, absent: torch.Tensor, tmp_path: Path, forgery: str
) -> None:
    """Whole, checksummed and under the chunk's own key, but another namespace's, chunk's or model's KV."""
    first, middle, last = tiny.chunks_of(prompt)
    with on_disk(model, tmp_path) as engine:
        engine.precompute([first, middle, last])
        key = ObjectKey(engine.content_key(middle), "plain")
        lease = engine.store.get(key)
        assert lease is not None
        with lease:
            header = replace(lease.header, checksums=())
        engine.forget([middle])
        forged: dict[str, Header] = {
            "namespace": replace(header, namespace=bytes(32)),
            "tokens": replace(header, token_ids=(*header.token_ids[:-1], header.token_ids[-1] ^ 1)),
            "layers": replace(header, layers=header.layers + 1),
            "kv_heads": replace(header, kv_heads=header.kv_heads + 1),
            "dtype": replace(header, dtype="float16"),
        }
        bad = forged[forgery]
        data = bytes(bad.payload_nbytes)
        assert engine.store.put(bad.sealed(data), data)
        got = engine.prefill(prompt, PLAN)
        assert [chunk.outcome for chunk in got.report.chunks] == ["hit", "failed", "hit"]
        word = {"namespace": "another namespace", "tokens": "tokens are not the chunk's"}.get(forgery, "another shape")
        assert word in got.report.chunks[1].reason
        assert torch.equal(got.logits, absent)


def test_a_store_below_one_object_answers_by_full_prefill(
    model: Path, prompt: Prompt, full: torch.Tensor, tmp_path: Path
) -> None:
    for settings in ({"host_bytes": 1, "disk_bytes": 0}, {"host_bytes": 1, "disk_bytes": 5000}):
        with on_disk(model, tmp_path / str(len(settings)), **settings) as engine:
            with pytest.raises(ResourceExhausted, match="larger than the whole tier"):
                engine.precompute(tiny.chunks_of(prompt))
            got = engine.prefill(prompt, PLAN)
            assert {chunk.outcome for chunk in got.report.chunks} == {"miss"}
            assert torch.equal(got.logits, full)


def test_leases_that_run_out_while_they_are_read(
    model: Path, prompt: Prompt, full: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk after another is lost in the middle; what is left is full prefill."""
    pread = FileIO.pread

    def slowly(io: FileIO, fd: int, into: memoryview, offset: int) -> int:
        got = pread(io, fd, into, offset)
        if offset >= 4096:
            time.sleep(0.02)
        return got

    with on_disk(model, tmp_path, lease_seconds=0.01) as engine:
        engine.precompute(tiny.chunks_of(prompt))
        with monkeypatch.context() as patch:
            patch.setattr(FileIO, "pread", slowly)
            got = engine.prefill(prompt, PLAN)
        assert not {chunk.outcome for chunk in got.report.chunks} & {"hit"}
        assert torch.equal(got.logits, full)


@pytest.mark.parametrize("host_bytes", [0, 64 * MB])
def test_64_threads_compute_a_chunk_once(model: Path, prompt: Prompt, tmp_path: Path, host_bytes: int) -> None:
    chunk = tiny.chunks_of(prompt)[0]
    with on_disk(model, tmp_path, host_bytes=host_bytes) as engine, ThreadPoolExecutor(64) as pool:
        barrier = threading.Barrier(64)

        def ask(_: int) -> list[str]:
            barrier.wait(30)
            return engine.precompute([chunk])

        assert {tuple(keys) for keys in pool.map(ask, range(64))} == {(engine.content_key(chunk),)}
        assert engine.stats().counters["precomputed"] == 1


def test_many_requests_that_miss_one_chunk_have_it_computed_once(model: Path, tmp_path: Path) -> None:
    prompt = tiny.prompt(chunks=1)
    store = StoreConfig(host_bytes=0, disk_bytes=256 * MB, directory=tmp_path, fsync=False)
    with tiny.engine(model, tmp_path, store=store, recompute_misses=True) as engine:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: engine.prefill(prompt, PLAN).logits, range(8)))
        for _ in range(3000):
            if engine.stats().counters.get("precomputed"):
                break
            threading.Event().wait(0.01)
        assert engine.stats().counters.get("precomputed") == 1
        hit = engine.prefill(prompt, PLAN)
        assert [chunk.outcome for chunk in hit.report.chunks] == ["hit"]
        assert all(torch.equal(logits, found[0]) or torch.equal(logits, hit.logits) for logits in found)


@pytest.mark.slow
def test_a_disk_that_fails_in_and_out_never_changes_an_answer(
    model: Path, prompt: Prompt, tmp_path: Path, flaky: Flaky
) -> None:
    """Every mixture of hits and faults among three chunks gives the answer of those chunks present or absent."""
    chunks = tiny.chunks_of(prompt)
    right: dict[tuple[bool, ...], torch.Tensor] = {}
    for mask in range(8):
        stored = tuple(bool(mask >> place & 1) for place in range(3))
        with on_disk(model, tmp_path / f"want{mask}") as engine:
            engine.precompute([chunk for chunk, there in zip(chunks, stored, strict=True) if there])
            right[stored] = engine.prefill(prompt, PLAN).logits
    with on_disk(model, tmp_path / "flaky") as engine:
        engine.precompute(chunks)
        seen = set()
        for number in range(60):
            flaky.period = 2 + number % 7
            got = engine.prefill(prompt, PLAN)
            flaky.period = 0
            stored = tuple(chunk.outcome == "hit" for chunk in got.report.chunks)
            seen.add(stored)
            assert torch.equal(got.logits, right[stored])
        assert len(seen) > 3
        assert engine.prefill(prompt, PLAN).report.chunks[0].outcome == "hit"


class Flaky:
    """Makes every so many reads of payloads fail."""

    period = 0
    count = 0


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    flaky = Flaky()
    pread = FileIO.pread

    def sometimes(io: FileIO, fd: int, into: memoryview, offset: int) -> int:
        if flaky.period:
            flaky.count += 1
            if flaky.count % flaky.period == 0:
                raise OSError(errno.EIO, "for this test")
        return pread(io, fd, into, offset)

    monkeypatch.setattr(FileIO, "pread", sometimes)
    yield flaky
    flaky.period = 0


def test_closing_while_others_ask(model: Path, prompt: Prompt, tmp_path: Path) -> None:
    """Who asks while the engine closes gets the right answer, or is told that it is closed."""
    with on_disk(model, tmp_path) as engine:
        engine.precompute(tiny.chunks_of(prompt))
        want = engine.prefill(prompt, PLAN).logits
    for least in range(3):
        engine, answered = on_disk(model, tmp_path), threading.Semaphore(0)

        def ask(_: int, engine: Engine = engine, answered: threading.Semaphore = answered) -> None:
            try:
                while True:
                    assert torch.equal(engine.prefill(prompt, PLAN).logits, want)
                    answered.release()
            except Closed:
                return
            except StoreError as error:
                raise AssertionError("a fault, and it was only closed") from error

        with ThreadPoolExecutor(4) as pool:
            asking = pool.map(ask, range(4))
            for _ in range(least):
                assert answered.acquire(timeout=60)
            engine.close()
            list(asking)


def test_64_threads_compute_a_chunk_once_where_the_host_does_not_take_it(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    chunk = tiny.chunks_of(tiny.prompt())[0]
    store = StoreConfig(host_bytes=1, disk_bytes=256 << 20, directory=tmp_path / "store", fsync=True)
    with tiny.engine(model, tmp_path, store=store) as engine, ThreadPoolExecutor(64) as pool:
        barrier = threading.Barrier(64)

        def ask(_: int) -> list[str]:
            barrier.wait(30)
            return engine.precompute([chunk])

        assert len({tuple(keys) for keys in pool.map(ask, range(64))}) == 1
        assert engine.stats().counters["precomputed"] == 1


def test_a_disk_that_cannot_be_asked_is_no_plain_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.save_model(tmp_path / "model")
    prompt = tiny.prompt()
    store = StoreConfig(host_bytes=0, disk_bytes=256 << 20, directory=tmp_path / "store", fsync=False)
    with tiny.engine(model, tmp_path, store=store) as engine:
        engine.precompute(tiny.chunks_of(prompt))
        with monkeypatch.context() as patch:
            patch.setattr(FileIO, "find", _raising(errno.EIO))
            got = engine.prefill(prompt, PLAN)
        assert {chunk.outcome for chunk in got.report.chunks} == {"failed"}
        assert all("EIO" in chunk.reason for chunk in got.report.chunks)

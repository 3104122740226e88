"""Stored KV goes with its documents: after other settings, faults, cancelled requests and restarts."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blend.config import EngineConfig
from blend.engine import Engine
from blend.errors import TierUnavailable
from blend.rag.library import Library
from blend.types import Chunk, Plan
from blend_server import ingestion
from blend_server.client import Client, Document, ServiceError
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import BlendServer
from tests.server.conftest import config

Start = Callable[..., BlendServer]

FERRY = Document("ferry", "The ferry leaves the north pier at nine. It carries forty cars. " * 4, "Ferry")
LIGHT = Document("light", "The lighthouse was built in 1888.", "Lighthouse")
SHELL = Document("shell", "A shell of the great scallop lay on the sand.", "Shell")
QUERY = Plan("query", 0.15)


def ends(client: Client, *documents: Document) -> list[str]:
    """The last stage of each document."""
    stages = [p.WhichOneof("stage") or "" for p in client.ingest(documents)]
    return [stage for stage in stages if stage in ("stored", "unchanged", "failed")]


def precomputed(client: Client) -> int:
    """How many chunks the engine has computed since it started."""
    return int(dict(client.stats().engine.details["counters"]).get("precomputed", 0))


def objects(client: Client) -> int:
    return {tier.name: tier.objects for tier in client.stats().engine.tiers}["disk"]


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to pass")


@pytest.fixture(autouse=True)
def not_reindexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of other settings are left alone, so that it is seen what becomes of their KV without that."""
    monkeypatch.setattr(Library, "to_renew", lambda library, tag: ())


@pytest.fixture
def other_engine(tiny_model_dir: Path, tmp_path: Path) -> EngineConfig:
    """The engine's settings with another sink, which gives every chunk another key."""
    return replace(config(tiny_model_dir, tmp_path).engine, sink=(5, 6))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is set, the store cannot remove anything."""
    down = threading.Event()
    forget = Engine.forget_keys

    def forgetting(engine: Engine, keys: Iterable[str], **options: Any) -> int:
        if down.is_set():
            raise TierUnavailable("no such device")
        return forget(engine, keys, **options)

    monkeypatch.setattr(Engine, "forget_keys", forgetting)
    monkeypatch.setattr(ingestion, "_RETRY_SECONDS", 0.05)
    yield down
    down.clear()


# ------------------------------------------------------------------------------------------ other settings


def test_a_deletion_removes_kv_that_another_engine_made(start: Start, other_engine: EngineConfig) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, FERRY, LIGHT)
        assert objects(client) > 2
    server.stop()
    with Client(start(engine=other_engine).address) as client:
        for document in (FERRY, LIGHT):
            client.delete(document.id)
        assert objects(client) == 0


def test_a_replacement_removes_kv_that_another_engine_made(start: Start, other_engine: EngineConfig) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, LIGHT)
    server.stop()
    with Client(start(engine=other_engine).address) as client:
        ends(client, replace(LIGHT, content="It was built in 1902."))
        assert objects(client) == 1


def test_a_deletion_removes_kv_that_questions_had_computed(start: Start, other_engine: EngineConfig) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, LIGHT)
    server.stop()
    with Client(start(engine=other_engine).address) as client:
        assert client.ask("When?", plan=QUERY).report.chunks[0].outcome == "miss"
        wait_for(lambda: objects(client) == 2)
        client.delete(LIGHT.id)
        assert objects(client) == 0


def test_counts_are_those_of_what_was_computed(start: Start) -> None:
    """Of a text that repeats itself, and of one that many ingest at once."""
    same = Document("same", "\n\n".join(["The same again and again, word for word, and nothing else at all. " * 8] * 6))
    with Client(start().address) as client:
        progress = list(client.ingest([same]))
        last = progress[-1].stored
        assert last.computed_chunks == precomputed(client)
        assert last.chunks == last.computed_chunks + last.reused_chunks
        assert [p.computed.reused for p in progress if p.WhichOneof("stage") == "computed"][-1] == last.reused_chunks
        before = precomputed(client)
        copies = [replace(FERRY, id=f"copy {number}") for number in range(6)]
        with ThreadPoolExecutor(len(copies)) as pool:
            told = list(pool.map(lambda copy: list(client.ingest([copy]))[-1].stored.computed_chunks, copies))
        assert sum(told) == precomputed(client) - before > 0


def test_the_same_document_again_gets_kv_for_the_present_engine(start: Start, other_engine: EngineConfig) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, FERRY)
        before = objects(client)
    server.stop()
    with Client(start(engine=other_engine).address) as client:
        progress = list(client.ingest([FERRY]))
        counts = [(p.computed.done, p.computed.total, p.computed.reused) for p in progress[:-1]]
        assert counts == [(done, before, 0) for done in range(before + 1)]
        last = progress[-1].unchanged
        assert (last.chunks, last.computed_chunks, last.reused_chunks) == (before, before, 0)
        report = client.ask("When does it leave?", k=10, plan=QUERY).report
        assert {chunk.outcome for chunk in report.chunks} == {"hit"}
        wait_for(lambda: objects(client) == before)  # what the other engine made is of no use any more
        client.delete(FERRY.id)
        assert objects(client) == 0


def test_kv_that_the_store_lost_comes_back_with_the_same_document(start: Start, tmp_path: Path) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, FERRY, LIGHT)
        before = objects(client)
    server.stop()
    shutil.rmtree(tmp_path / "data" / "store")
    with Client(start().address) as client:
        assert ends(client, FERRY, LIGHT) == ["unchanged", "unchanged"]
        assert objects(client) == before
        assert client.ask("When?", plan=QUERY).report.chunks[0].outcome == "hit"
        (last,) = client.ingest([FERRY])
        assert (last.unchanged.computed_chunks, last.unchanged.reused_chunks) == (0, last.unchanged.chunks)


# ------------------------------------------------------------------------------------------ faults


def test_a_store_that_fails_to_forget_is_asked_again(
    start: Start, broken: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(start().address) as client:
        ends(client, FERRY, LIGHT)
        kept = objects(client)
        broken.set()
        with caplog.at_level(logging.WARNING):
            dropped = client.delete(FERRY.id)
        assert dropped == kept - 1
        assert [d.id for d in client.documents()] == [LIGHT.id]
        assert objects(client) == kept
        assert "event=forget_postponed code=UNAVAILABLE" in caplog.text
        broken.clear()
        wait_for(lambda: objects(client) == 1)
        report = client.ask("When?", plan=QUERY).report
        assert [chunk.outcome for chunk in report.chunks] == ["hit"]


def test_what_an_earlier_run_did_not_forget_goes_at_the_start(start: Start, broken: threading.Event) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, FERRY, LIGHT, SHELL)
        broken.set()
        client.delete(FERRY.id)
        ends(client, replace(LIGHT, content="It was built in 1902."))
        assert objects(client) > 2
    server.stop()
    broken.clear()
    with Client(start().address) as client:
        wait_for(lambda: objects(client) == 2)
        assert ends(client, SHELL) == ["unchanged"]
        assert client.ask("What lay on the sand?", k=1, plan=QUERY).report.chunks[0].outcome == "hit"


def test_a_document_that_comes_again_keeps_its_kv(start: Start, broken: threading.Event) -> None:
    with Client(start().address) as client:
        ends(client, FERRY)
        kept = objects(client)
        broken.set()
        client.delete(FERRY.id)
        computed = [p.computed for p in client.ingest([FERRY]) if p.WhichOneof("stage") == "computed"]
        assert [c.reused for c in computed] == [kept]
        broken.clear()
        assert ends(client, LIGHT, SHELL) == ["stored", "stored"]
        client.delete(SHELL.id)
        assert objects(client) == kept + 1
        report = client.ask("When does it leave?", k=10, plan=QUERY).report
        assert {chunk.outcome for chunk in report.chunks} == {"hit"}


@pytest.mark.parametrize("where", ["precompute", "commit"])
def test_a_document_that_fails_leaves_no_kv(client: Client, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    ends(client, LIGHT)
    kept = objects(client)
    compute, calls = Engine.precompute, []

    def failing(engine: Engine, chunks: Any, *arguments: Any, **options: Any) -> list[str]:
        calls.append(chunks)
        if len(calls) == 2:
            raise TierUnavailable("no space")
        return compute(engine, chunks, *arguments, **options)

    def lost(*arguments: Any) -> None:
        raise TierUnavailable("no space")

    if where == "precompute":
        monkeypatch.setattr(Engine, "precompute", failing)
    else:
        monkeypatch.setattr(Library, "commit", lost)
    both = replace(FERRY, content=f"{LIGHT.content}\n\n{FERRY.content}", title=LIGHT.title)
    assert ends(client, both) == ["failed"]
    wait_for(lambda: objects(client) == kept)
    assert client.ask("When?", plan=QUERY).report.chunks[0].outcome == "hit"


def test_a_document_that_is_cancelled_leaves_no_kv(client: Client) -> None:
    stream = client.ingest([replace(FERRY, content=FERRY.content * 6)])
    for progress in stream:
        if progress.WhichOneof("stage") == "computed" and progress.computed.done == 2:
            break
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: client.stats().queue.requests == 0)
    wait_for(lambda: objects(client) == 0)
    assert not list(client.documents())


def test_kv_of_a_run_that_was_killed_goes_at_the_next_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs any more after the KV was made: no commit, no forgetting."""
    server = start()
    with monkeypatch.context() as dead, Client(server.address) as client:
        dead.setattr(Library, "commit", lambda *_: (_ for _ in ()).throw(TierUnavailable("killed")))
        dead.setattr(ingestion.Ingestion, "_forget", lambda *_: None)
        assert ends(client, FERRY) == ["failed"]
        made = objects(client)
        assert made > 1
        server.stop()
    with Client(start().address) as client:
        wait_for(lambda: objects(client) == 0)


def test_a_document_that_goes_while_it_comes_again_leaves_no_kv(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged document whose KV is missing is deleted while that is computed."""
    ends(client, LIGHT)
    reached, go_on = threading.Event(), threading.Event()
    compute = Engine.precompute

    def slow(engine: Engine, chunks: Any, *arguments: Any, **options: Any) -> list[str]:
        reached.set()
        go_on.wait(20)
        return compute(engine, chunks, *arguments, **options)

    def all_missing(engine: Engine, chunks: Iterable[Chunk], **options: Any) -> list[Chunk]:
        return list(chunks)

    monkeypatch.setattr(Engine, "precompute", slow)
    monkeypatch.setattr(Engine, "missing", all_missing)
    seen: list[pb.IngestProgress] = []
    again = threading.Thread(target=lambda: seen.extend(client.ingest([LIGHT])))
    again.start()
    assert reached.wait(20)
    client.delete(LIGHT.id)
    go_on.set()
    again.join()
    assert seen[-1].WhichOneof("stage") == "unchanged"
    wait_for(lambda: objects(client) == 0)
    with pytest.raises(ServiceError, match="no documents"):
        client.ask("When?")

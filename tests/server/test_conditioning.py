"""Chunks are encoded behind their neighbours in idle time: then answers use that, until a neighbour goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blend.config import OperationsConfig, RagConfig, SecurityConfig
from blend.engine import Engine
from blend.errors import TierUnavailable
from blend.store.key import ObjectKey
from blend.types import Chunk, Plan
from blend_server import conditioning
from blend_server.client import Client, Document
from blend_server.conditioning import Conditioning
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.faults import watch_engines
from tests.server.test_metrics import scrape, value

Start = Callable[..., BlendServer]

RAG = RagConfig(chunk_tokens=128, neighbours=2, top_k=3, max_new_tokens=8)
OFF = RagConfig(chunk_tokens=128, neighbours=0, top_k=3, max_new_tokens=8)
NAMES = ("attic", "boiler room", "chapel", "dairy")
REUSE = Plan("reuse")


def document(name: str) -> Document:
    return Document(name, f"The {name} has a green door with a lock of brass.", name)


def ingest(client: Client, *names: str) -> None:
    stages = [stage.WhichOneof("stage") for stage in client.ingest(map(document, names))]
    assert stages.count("stored") == len(names)


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not come to pass")


def done(client: Client, count: int) -> bool:
    corpus = client.stats().corpus
    return (corpus.conditioned, corpus.to_condition) == (count, 0)


def variants(client: Client) -> dict[str, str]:
    """What an answer read of each document's only chunk: the beginning of the variant's name, or what became of it."""
    by_key = {passage.key: passage.document_id for passage in client.retrieve("green door", k=10)}
    chunks = client.ask("Which door is green?", k=10, plan=REUSE).report.chunks
    return {by_key[chunk.key]: (chunk.variant or chunk.outcome)[:1] for chunk in chunks}


def behind(engine: Engine) -> dict[str, tuple[str, ...]]:
    """What each stored variant was encoded behind, by content key."""
    keys = [key for key in list(engine.store.keys()) if key.conditioned]
    return {header.key.content: header.neighbours for header in engine.store.headers(keys)}


def keys(client: Client) -> dict[str, str]:
    return {passage.document_id: passage.key for passage in client.retrieve("green door", k=100)}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    return watch_engines(monkeypatch)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for more documents, nor long after a fault."""
    monkeypatch.setattr(conditioning, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(conditioning, "_RETRY_SECONDS", 0.05)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """An event that is set once a chunk is about to be encoded behind others, which waits for the second one."""
    reached, go_on = threading.Event(), threading.Event()
    precompute = Engine.precompute

    def waiting(engine: Engine, chunks: Any, behind: Sequence[Sequence[Chunk]] | None = None, **options: Any) -> Any:
        if behind is not None:
            reached.set()
            assert go_on.wait(60)
        return precompute(engine, chunks, behind, **options)

    monkeypatch.setattr(Engine, "precompute", waiting)
    yield reached, go_on
    go_on.set()


@pytest.mark.usefixtures("soon")
def test_answers_use_it_once_it_is_there(start: Start, engines: list[Engine]) -> None:
    server = start(rag=RAG, operations=OperationsConfig("127.0.0.1:0"))
    with Client(server.address) as client:
        ingest(client, *NAMES)
        wait_for(lambda: done(client, 4))
        assert variants(client) == dict.fromkeys(NAMES, "c")
        of = {key: name for name, key in keys(client).items()}
        found = {of[key]: [of[other] for other in others] for key, others in behind(engines[0]).items()}
        assert found.keys() == set(NAMES)
        assert all(len({*others, name}) == 3 for name, others in found.items())
        page = scrape(server.metrics_address)
        assert value(page, "blend_conditioning_total", outcome="done") == 4
        assert value(page, "blend_conditioning_total", outcome="failed") == 0
        assert value(page, "blend_conditioning_backlog") == 0
        assert value(page, "blend_conditioning_seconds_total") > 0
    server.stop()
    server = start(rag=RAG)
    with Client(server.address) as client:
        wait_for(lambda: done(client, 4))
        counters = dict(client.stats().engine.details["counters"])
        assert counters.get("precomputed", 0) == 0, "what is stored is not encoded again"


@pytest.mark.usefixtures("soon")
def test_a_deleted_neighbour_takes_it_along_at_once(
    start: Start, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(start(rag=RAG).address) as client:
        ingest(client, *NAMES)
        wait_for(lambda: done(client, 4))
        gone = keys(client)["chapel"]
        others = {name for name, key in keys(client).items() if gone in behind(engines[0])[key]}
        assert others
        monkeypatch.setattr(conditioning, "_QUIET_SECONDS", 3600.0)
        client.delete("chapel")
        assert gone not in behind(engines[0]) and not any(gone in found for found in behind(engines[0]).values())
        assert variants(client) == {name: "p" if name in others else "c" for name in NAMES if name != "chapel"}


@pytest.mark.usefixtures("soon")
def test_it_comes_back_behind_others(start: Start, engines: list[Engine]) -> None:
    with Client(start(rag=RAG).address) as client:
        ingest(client, *NAMES)
        wait_for(lambda: done(client, 4))
        gone = keys(client)["chapel"]
        client.delete("chapel")
        wait_for(lambda: done(client, 3))
        assert variants(client) == {name: "c" for name in NAMES if name != "chapel"}
        left = set(keys(client).values())
        assert behind(engines[0]).keys() == left and gone not in left
        assert all(left.issuperset(found) for found in behind(engines[0]).values())


@pytest.mark.usefixtures("soon")
def test_one_that_goes_while_it_is_used_does_not_come_back(
    start: Start, engines: list[Engine], held: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held
    with Client(start(rag=RAG).address) as client:
        ingest(client, *NAMES)
        assert reached.wait(60)
        before = keys(client)
        assert set(variants(client).values()) == {"p"}, "answers do not wait"
        deleting = [threading.Thread(target=client.delete, args=(name,)) for name in ("attic", "chapel")]
        for thread in deleting:
            thread.start()
        wait_for(lambda: keys(client).keys() == {"boiler room", "dairy"})
        go_on.set()
        for thread in deleting:
            thread.join(60)
            assert not thread.is_alive()
        wait_for(lambda: done(client, 2))
        gone = {before["attic"], before["chapel"]}
        assert {key.content for key in list(engines[0].store.keys())} == set(keys(client).values())
        assert gone.isdisjoint(other for found in behind(engines[0]).values() for other in found)


@pytest.mark.usefixtures("soon")
def test_off_there_is_none(start: Start, engines: list[Engine]) -> None:
    server = start(rag=OFF, operations=OperationsConfig("127.0.0.1:0"))
    with Client(server.address) as client:
        ingest(client, *NAMES)
        assert set(variants(client).values()) == {"p"} and done(client, 0)
        assert not behind(engines[0])
        assert not [name for name, _ in scrape(server.metrics_address) if "conditioning" in name]


@pytest.mark.usefixtures("soon")
def test_other_tenants_chunks_are_never_neighbours(start: Start, engines: list[Engine], tmp_path: Path) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    tokens = {name: accounts.token(f"{name}-writer", name, "writer") for name in ("acme", "umbrella")}
    security = SecurityConfig(access_file=accounts.write())
    server = start(rag=RAG, security=security, operations=OperationsConfig("127.0.0.1:0"))
    counts = {"acme": 2, "umbrella": 1}  # a lone chunk has no neighbours, however near others' are
    for name, token in tokens.items():
        with Client(server.address, token=token) as client:
            ingest(client, *NAMES[: counts[name]])
    with (
        Client(server.address, token=tokens["acme"]) as acme,
        Client(server.address, token=tokens["umbrella"]) as other,
    ):
        wait_for(lambda: done(acme, 2) and done(other, 0))
        assert set(variants(acme).values()) == {"c"} and variants(other) == {"attic": "p"}
        ingest(other, "chapel")
        wait_for(lambda: done(other, 2))
        assert done(acme, 2)
    stored = behind(engines[0])
    assert len(stored) == 4
    for key, others in stored.items():
        assert {ObjectKey(other, "plain").namespace for other in others} == {ObjectKey(key, "plain").namespace}
    page = scrape(server.metrics_address)
    assert value(page, "blend_tenant_chunks", tenant="acme", state="conditioned") == 2
    assert value(page, "blend_tenant_chunks", tenant="umbrella", state="waiting") == 0


@pytest.mark.usefixtures("soon")
def test_a_server_that_stops_half_way_goes_on_at_the_next_start(
    start: Start, engines: list[Engine], held: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held
    server = start(rag=RAG)
    with Client(server.address) as client:
        ingest(client, *NAMES)
    assert reached.wait(60)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    time.sleep(0.2)
    go_on.set()
    stopping.join(60)
    assert not stopping.is_alive()
    server = start(rag=RAG)
    with Client(server.address) as client:
        wait_for(lambda: done(client, 4))
        assert set(variants(client).values()) == {"c"}
        encoded = dict(client.stats().engine.details["counters"])["precomputed"]
        assert 2 <= encoded <= 3, "the one that had begun was finished"


@pytest.mark.usefixtures("soon")
def test_a_fault_is_logged_and_it_comes_again(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompute, faults = Engine.precompute, [0.05, 0.1]

    def failing(engine: Engine, chunks: Any, behind: Sequence[Sequence[Chunk]] | None = None, **options: Any) -> Any:
        if behind is not None and faults:
            del faults[0]
            raise TierUnavailable("no such device")
        return precompute(engine, chunks, behind, **options)

    monkeypatch.setattr(Engine, "precompute", failing)
    with caplog.at_level(logging.INFO, "blend_server"), Client(start(rag=RAG).address) as client:
        ingest(client, "attic", "chapel")
        wait_for(lambda: done(client, 2))
        wait_for(lambda: "event=conditioned tenant=default encoded=2 conditioned=2" in caplog.messages)
    failures = [line for line in caplog.messages if line.startswith("event=conditioning_postponed")]
    about = "event=conditioning_postponed tenant=default code=UNAVAILABLE retry_seconds="
    assert failures == [f"{about}0.05", f"{about}0.1"]


@pytest.mark.usefixtures("soon")
def test_a_server_at_rest_does_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    turn = Conditioning._turn

    async def counted(self: Conditioning, work: Any) -> None:
        turns.append(work)
        await turn(self, work)

    monkeypatch.setattr(Conditioning, "_turn", counted)
    with Client(start(rag=RAG).address) as client:
        ingest(client, *NAMES)
        wait_for(lambda: done(client, 4))
        time.sleep(0.3)
        before = len(turns)
        client.ask("Which door is green?", plan=REUSE)
        time.sleep(0.3)
        assert len(turns) == before


@pytest.mark.usefixtures("soon")
def test_a_tenant_that_is_closed_goes_on_when_it_is_opened_again(
    start: Start, tmp_path: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held
    accounts = Accounts(tmp_path / "access.yaml")
    tokens = {name: accounts.token(f"{name}-writer", name, "writer") for name in ("acme", "umbrella")}
    security = SecurityConfig(access_file=accounts.write(), max_open_tenants=1)
    server = start(rag=RAG, security=security)
    with Client(server.address, token=tokens["acme"]) as client:
        ingest(client, *NAMES)
        assert reached.wait(60)
        with Client(server.address, token=tokens["umbrella"]) as other:
            opening = threading.Thread(target=other.stats)  # it takes acme's place
            opening.start()
            go_on.set()
            opening.join(60)
            assert not opening.is_alive()
        wait_for(lambda: done(client, 4))

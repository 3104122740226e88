"""Stored KV is forgotten part by part: other tenants have turns, and neither start nor end waits for all of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from blend.config import SecurityConfig
from blend.engine import Engine
from blend_server import ingestion
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.ingestion import Ingestion
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.faults import wait_for

LONG = Document("long", " ".join(f"Lamp {n} of the north pier burns oil of kind {n * 7}." for n in range(40)), "Lamps")
SHORT = Document("short", "The lighthouse was built in 1888.", "Lighthouse")
PARTS = 8
Start = Callable[..., BlendServer]


class Turns:
    """Has each part wait for its turn; ``taken`` counts those that were reached."""

    def __init__(self) -> None:
        self.taken = 0
        self.free = threading.Semaphore(0)

    def end(self) -> None:
        self.free.release(10_000)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """Parts of one chunk, each of which waits for its turn."""
    made, forget = Turns(), Engine.forget_keys

    def forgetting(engine: Engine, keys: Iterable[str]) -> int:
        made.taken += 1
        assert made.free.acquire(timeout=120)
        return forget(engine, keys)

    monkeypatch.setattr(Engine, "forget_keys", forgetting)
    monkeypatch.setattr(ingestion, "_FORGET_AT_ONCE", 1)
    yield made
    made.end()


def objects(client: Client) -> int:
    return {tier.name: tier.objects for tier in client.stats().engine.tiers}["disk"]


def test_other_tenants_have_turns_between(start: Start, turns: Turns, tmp_path: Path) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    tokens = [accounts.token(name, name, "writer") for name in ("acme", "umbrella")]
    server = start(security=SecurityConfig(access_file=accounts.write()))
    with ThreadPoolExecutor(2) as pool:
        acme, umbrella = (Client(server.address, token=token, retries=Retries.none()) for token in tokens)
        with acme, umbrella:
            try:
                *_, last = acme.ingest([LONG])
                assert last.stored.chunks >= PARTS
                deleting = pool.submit(acme.delete, LONG.id)
                wait_for(lambda: turns.taken == 1)
                ingesting = pool.submit(lambda: list(umbrella.ingest([SHORT])))
                for given in range(1, PARTS):
                    if wait([ingesting], 0.5).done:
                        break
                    turns.free.release()
                    wait_for(lambda given=given: turns.taken == given + 1)
                assert ingesting.result(0)[-1].WhichOneof("stage") == "stored"
                assert not deleting.done()
            finally:
                turns.end()
            assert deleting.result(60) == last.stored.chunks


def test_neither_the_end_nor_the_start_waits_for_all(
    start: Start, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, close = threading.Event(), Ingestion.close

    async def telling(self: Ingestion) -> None:
        task = asyncio.ensure_future(close(self))
        await asyncio.sleep(0)  # it has begun
        closing.set()
        await task

    monkeypatch.setattr(Ingestion, "close", telling)
    server = start(drain_seconds=0)
    with ThreadPoolExecutor(2) as pool, Client(server.address, retries=Retries.none()) as client:
        try:
            *_, last = client.ingest([LONG])
            assert last.stored.chunks >= PARTS
            deleting = pool.submit(client.delete, LONG.id)
            wait_for(lambda: turns.taken == 1)
            stopping = pool.submit(server.stop)
            assert closing.wait(60)
        finally:
            turns.free.release(2)
        stopping.result(60)
        assert isinstance(deleting.exception(60), ServiceError)
    assert turns.taken <= 2
    with Client(start().address) as client:
        assert not list(client.documents())
        wait_for(lambda: turns.taken > 2)
        assert 0 < objects(client) <= last.stored.chunks
        turns.end()
        wait_for(lambda: objects(client) == 0)

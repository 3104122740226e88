"""Two services on one Mooncake store: the second answers from the first one's work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blend.config import EngineConfig, MooncakeConfig, ResidencyConfig, StoreConfig
from blend.types import Answer, Plan
from blend_server.client import Client, Document
from blend_server.server import BlendServer
from tests.server.conftest import config
from tests.store.mooncake_server import Master, cluster, config_for

__all__ = ["cluster"]
Serve = Callable[[str, EngineConfig], BlendServer]
DOCUMENTS = [
    Document("light", "The lighthouse was built in 1888.", "Lighthouse"),
    Document("ferry", "The ferry leaves at nine from the north pier.", "Ferry"),
]
QUERY = Plan("query", 0.15)


@pytest.fixture
def serve(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers of the tiny model, each with a data directory of its name; they are stopped in the end."""
    with ExitStack() as stack:
        yield lambda name, engine: stack.enter_context(
            BlendServer(config(tiny_model_dir, tmp_path / name, engine=engine))
        )


def engine(model: Path, mooncake: MooncakeConfig, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "host_bytes": 64 << 20,
        "disk_bytes": 0,
        "secret": b"the secret of both services",
        "mooncake": mooncake,
        **changes,
    }
    return EngineConfig(model=str(model), dtype="float32", store=StoreConfig(**settings))  # type: ignore[arg-type]


def ingest(server: BlendServer) -> tuple[int, int, int]:
    """Ingest the documents; return their chunks, those that were reused, and those that were computed."""
    with Client(server.address) as client:
        stored = [p.stored for p in client.ingest(DOCUMENTS) if p.WhichOneof("stage") == "stored"]
        assert len(stored) == len(DOCUMENTS)
        computed = sum(p.computed_chunks for p in stored)
        assert dict(client.stats().engine.details["counters"]).get("precomputed", 0) == computed
        return sum(p.chunks for p in stored), sum(p.reused_chunks for p in stored), computed


def ask(server: BlendServer) -> Answer:
    with Client(server.address) as client:
        (answer,) = [
            event for event in client.answer("When does the ferry leave?", k=2, plan=QUERY) if isinstance(event, Answer)
        ]
        return answer


def test_the_second_service_computes_nothing(serve: Serve, cluster: Master, tiny_model_dir: Path) -> None:
    mooncake = config_for(cluster, prefix="services", staging_bytes=16 << 20)
    first = serve("first", engine(tiny_model_dir, mooncake))
    chunks, reused, computed = ingest(first)
    assert (reused, computed) == (0, chunks)
    second = serve("second", engine(tiny_model_dir, mooncake))
    assert ingest(second) == (chunks, chunks, 0)
    want, got = ask(first), ask(second)
    assert {(chunk.outcome, chunk.tier) for chunk in want.report.chunks} == {("hit", "host")}
    assert {(chunk.outcome, chunk.tier) for chunk in got.report.chunks} == {("hit", "mooncake")}
    assert got.token_ids == want.token_ids
    assert {chunk.tier for chunk in ask(second).report.chunks} == {"host"}


def test_another_secret_shares_nothing(serve: Serve, cluster: Master, tiny_model_dir: Path) -> None:
    mooncake = config_for(cluster, prefix="strangers", staging_bytes=16 << 20)
    chunks, _, _ = ingest(serve("first", engine(tiny_model_dir, mooncake)))
    stranger = engine(tiny_model_dir, mooncake, secret=b"another service's secret")
    assert ingest(serve("second", stranger)) == (chunks, 0, chunks)


def test_a_server_says_where_its_events_are(
    serve: Serve, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = StoreConfig(host_bytes=64 << 20, disk_bytes=0, residency=ResidencyConfig("front"))
    with caplog.at_level(logging.INFO, "blend_server"):
        server = serve("front", EngineConfig(model=str(tiny_model_dir), dtype="float32", store=store))
    (line,) = [record.message for record in caplog.records if record.message.startswith("event=residency")]
    assert "node=front publish=tcp://127.0.0.1:" in line
    assert any(thread.name == "blend-events" for thread in threading.enumerate())
    server.stop()
    assert not any(thread.name.startswith("blend-events") for thread in threading.enumerate())

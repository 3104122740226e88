"""Real servers on loopback ports: one with a tiny random model for behaviour, one with the default model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blend.config import EngineConfig, RagConfig, ServerConfig, StoreConfig
from blend_server.client import Client
from blend_server.server import BlendServer
from tests.server.faults import Served, Serving
from tests.tiny import save_model

MiB = 1 << 20


@pytest.fixture(autouse=True)
def logs_go_where_they_went() -> Iterator[None]:
    """What a test has the process log, and where to, is not so for the next one."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random model with a context of 2048 tokens."""
    return save_model(tmp_path_factory.mktemp("tiny-model"), max_position_embeddings=2048)


def config(model: Path, data_dir: Path, **changes: object) -> ServerConfig:
    """Settings for a server of small tiers and small chunks on a free port, which does nothing in idle time."""
    settings: dict[str, object] = {
        "address": "127.0.0.1:0",
        "data_dir": data_dir,
        "drain_seconds": 10,
        "engine": EngineConfig(
            model=str(model),
            dtype="float32",
            store=StoreConfig(host_bytes=64 * MiB, disk_bytes=256 * MiB, fsync=False),
        ),
        "rag": RagConfig(chunk_tokens=128, neighbours=0, top_k=3, max_new_tokens=8),
    }
    return ServerConfig(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture
def start(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., BlendServer]]:
    """Starts servers of the tiny model with changed settings; they are stopped at the end of the test."""
    started: list[BlendServer] = []

    def make(**changes: object) -> BlendServer:
        server = BlendServer(config(tiny_model_dir, tmp_path / "data", **changes))
        server.start()
        started.append(server)
        return server

    yield make
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def tiny_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendServer]:
    """One server of the tiny model for all tests."""
    with BlendServer(config(tiny_model_dir, tmp_path_factory.mktemp("tiny-server"))) as server:
        yield server


@pytest.fixture
def client(tiny_server: BlendServer) -> Iterator[Client]:
    """A client of the tiny model's server, which has no documents at first."""
    with Client(tiny_server.address) as made:
        for document in list(made.documents()):
            made.delete(document.id)
        yield made


@pytest.fixture(scope="session")
def default_server(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendServer]:
    """One server of the default model for all tests."""
    settings = config(default_model_dir, tmp_path_factory.mktemp("default-server"))
    engine = EngineConfig(dtype="float32", store=settings.engine.store)
    with BlendServer(config(default_model_dir, settings.path, engine=engine)) as server:
        yield server


@pytest.fixture
def serving(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Serving]:
    """Starts commands of the tiny model on one data directory; whatever still runs is killed in the end."""
    started: list[Served] = []

    def start(*more: str) -> Served:
        started.append(Served(tiny_model_dir, tmp_path / "data", tmp_path / "log", *more))
        return started[-1]

    yield start
    for server in started:
        server.kill()

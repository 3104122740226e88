"""A router before two engines without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blend_server.client import Client, Retries, ServiceError
from blend_server.router import EngineAddress, RouterConfig
from blend_server.router.server import Router
from tests.server.router.fakes import FakeEngine, wait_for

Engines = tuple[FakeEngine, FakeEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Two engines that run, ``a`` and ``b``."""
    made = FakeEngine("a"), FakeEngine("b")
    for engine in made:
        engine.start()
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture
def route(engines: Engines, tmp_path: Path) -> Iterator[Callable[..., Router]]:
    """Starts routers with changed settings, one after another with the same journal; the last is stopped at the end."""
    started: list[Router] = []

    def make(**changes: object) -> Router:
        for router in started:
            router.stop()
        settings: dict[str, object] = {
            "engines": tuple(EngineAddress(engine.name, engine.address) for engine in engines),
            "address": "127.0.0.1:0",
            "data_dir": tmp_path / "router",
            "drain_seconds": 5,
            **changes,
        }
        router = Router(RouterConfig(**settings))  # type: ignore[arg-type]
        router.start()
        started.append(router)
        return router

    yield make
    for router in started:
        router.stop()


@pytest.fixture
def client(route: Callable[..., Router]) -> Iterator[Client]:
    """A client of a router whose engines are both current."""
    with Client(route().address, timeout=20, retries=Retries.none()) as made:
        ready(made, "a", "b")
        yield made


def ready(client: Client, *names: str) -> None:
    """Wait until exactly these engines serve and hold what they should."""

    def current() -> bool:
        try:
            stats = client.stats()
        except ServiceError:
            return False
        return {tier.name.split("/")[0] for tier in stats.engine.tiers} == set(names)

    wait_for(f"engines {names}", current)

"""Clients that go away, at every stage of what they asked for: nothing of it is left running or held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blend.config import SecurityConfig
from blend.engine import Engine
from blend.rag.library import Library
from blend.rag.prompt import PromptBuilder
from blend.types import Plan, Token
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.conftest import config
from tests.server.faults import Hold, Wire, wait_for, watch_engines

LIGHT = Document("light", "The lighthouse was built in 1888. " * 8, "Lighthouse")
FERRY = Document("ferry", "The ferry leaves the north pier at nine. It carries forty cars. " * 8, "Ferry")
QUERY = Plan("query", 0.15)
Leaving = tuple[Client, Callable[[], None]]


class Service:
    """A server whose tenant ``acme`` may have one call at a time, so that one that is not over keeps out all others."""

    def __init__(self, model: Path, directory: Path) -> None:
        accounts = Accounts(directory / "access.yaml")
        accounts.entries["tenants"] = {"acme": {"requests": 1}}
        self._token = accounts.token("acme", "acme", "writer")
        admin = accounts.token("admin", "default", "admin")
        security = SecurityConfig(access_file=accounts.write())
        self.server = BlendServer(config(model, directory / "data", security=security))
        with pytest.MonkeyPatch.context() as patch:
            engines = watch_engines(patch)
            self.server.start()
        self.engine: Any = engines[0]
        self.acme, self.admin = self.client(self.server.address), Client(self.server.address, token=admin)
        list(self.acme.ingest([LIGHT]))

    def client(self, address: str) -> Client:
        return Client(address, retries=Retries.none(), token=self._token)

    def requests(self) -> int:
        """Calls that hold a place before the engine."""
        return int(self.admin.stats().queue.requests)

    def held(self) -> int:
        """Disk that the KV of ``acme`` takes."""
        return int({tier.name: tier.used_bytes for tier in self.acme.stats().engine.tiers}["disk"])

    def is_free(self) -> None:
        """Return once nothing is under way: no place is taken, no memory held, no thread at work for anybody."""
        wait_for(lambda: _code(self.acme.stats) == "OK")
        wait_for(lambda: self.requests() == 0)
        scheduler = self.engine._scheduler
        wait_for(lambda: not self.engine._admission._rooms and not scheduler._running and scheduler.waiting == 0)
        wait_for(lambda: scheduler.backlog_ms() == 0.0)
        assert self.acme.ask("When was it built?", plan=QUERY, max_new_tokens=2).report.cached > 0

    def close(self) -> None:
        self.acme.close()
        self.admin.close()
        self.server.stop()


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tiny_model_dir, tmp_path_factory.mktemp("left"))
    yield made
    made.close()


@pytest.fixture
def service(whole: Service) -> Service:
    """The server of all tests here, which has one document at first."""
    whole.is_free()
    if len(list(whole.acme.documents())) > 1:
        whole.acme.delete(FERRY.id)
    return whole


@pytest.fixture(params=["cancels", "is cut off"])
def leaving(request: pytest.FixtureRequest, service: Service) -> Iterator[Leaving]:
    """A client, and how it goes away."""
    wire = Wire(service.server.address)
    with service.client(wire.address) as client:
        yield client, client.close if request.param == "cancels" else wire.cut
    wire.cut()


def _code(call: Callable[[], Any]) -> str:
    try:
        call()
    except ServiceError as error:
        return error.code
    return "OK"


def read(stream: Iterator[Any], seen: list[Any]) -> threading.Thread:
    """Read a stream in a thread, to its end or its error."""

    def run() -> None:
        try:
            for event in stream:
                seen.append(event)
        except ServiceError as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


ANSWERING = {
    "while passages are sought": (Library, "retrieve"),
    "while the prompt is made": (PromptBuilder, "build"),
    "as the engine is asked": (Engine, "stream"),
}


@pytest.mark.parametrize("stage", ANSWERING)
def test_before_the_first_event_of_an_answer(
    service: Service, leaving: Leaving, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    client, leave = leaving
    with monkeypatch.context() as patch:
        hold = Hold(patch, *ANSWERING[stage])
        seen: list[Any] = []
        stream = client.answer("When was it built?", plan=QUERY, max_new_tokens=1500)
        reader = read(stream, seen)
        assert hold.entered.wait(60)
        leave()
        reader.join(60)
        hold.let_go()
        service.is_free()
    assert not any(isinstance(event, Token) for event in seen)


@pytest.mark.parametrize("events", [1, 2, 5])
def test_after_some_events_of_an_answer(service: Service, leaving: Leaving, events: int) -> None:
    client, leave = leaving
    stream = client.answer("When was it built?", plan=QUERY, max_new_tokens=1500, compare_full=True)
    for _ in range(events):
        next(stream)
    before = service.engine.stats().counters["new_tokens"]
    leave()
    service.is_free()
    assert service.engine.stats().counters["new_tokens"] < before + 1400


def test_with_a_whole_answer_unread(service: Service, leaving: Leaving) -> None:
    client, leave = leaving
    stream = client.answer("When was it built?", plan=QUERY, max_new_tokens=40)
    next(stream)
    wait_for(lambda: service.requests() == 0)  # whoever reads slowly holds no place
    leave()
    service.is_free()


INGESTING = {
    "while it is cut": (Library, "prepare"),
    "while it is embedded": (Library, "embed"),
    "while its KV is looked for": (Engine, "missing"),
    "while it is announced": (Library, "announce"),
    "while a chunk is encoded": (Engine, "precompute"),
    "while it is stored": (Library, "commit"),
}


@pytest.mark.parametrize("stage", INGESTING)
def test_during_an_ingestion(service: Service, leaving: Leaving, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    client, leave = leaving
    held = service.held()
    with monkeypatch.context() as patch:
        hold = Hold(patch, *INGESTING[stage])
        stream = client.ingest([FERRY])
        reader = read(stream, [])
        assert hold.entered.wait(60)
        leave()
        reader.join(60)
        hold.let_go()
        service.is_free()
    # What had begun to be stored is stored; of anything else nothing is left, its KV neither.
    there = stage == "while it is stored"
    wait_for(lambda: [document.id for document in service.acme.documents()] == ["ferry"] * there + ["light"])
    if not there:
        wait_for(lambda: service.held() == held)
    assert [p.WhichOneof("stage") for p in service.acme.ingest([FERRY])][-1] == ("unchanged" if there else "stored")


def test_between_two_documents(service: Service, leaving: Leaving) -> None:
    client, leave = leaving
    done = threading.Event()

    def waiting() -> Iterable[Document]:
        yield FERRY
        done.wait(60)

    stream = client.ingest(waiting())
    while next(stream).WhichOneof("stage") != "stored":
        pass
    leave()
    service.is_free()
    done.set()
    assert [document.id for document in service.acme.documents()] == ["ferry", "light"]


def test_many_that_come_and_go_leave_nothing(service: Service) -> None:
    """Far more than there are places for, one after another."""
    for _ in range(40):
        with service.client(service.server.address) as client:
            next(client.answer("When was it built?", plan=QUERY, max_new_tokens=200))
        wait_for(lambda: _code(service.acme.stats) == "OK")
    service.is_free()

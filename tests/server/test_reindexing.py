"""Documents of other settings are brought up to date in the background, while callers go first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blend.config import RagConfig, SecurityConfig
from blend.errors import InvalidDocument
from blend.rag.library import Library, Prepared
from blend.store.disk import DiskTier
from blend.types import Plan
from blend_server.client import Client, Document, ServiceError
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.conftest import config

Start = Callable[..., BlendServer]

QUERY = Plan("query", 0.15)
SMALLER = RagConfig(chunk_tokens=64, neighbours=0, top_k=3, max_new_tokens=8)
NAMES = ("attic", "boiler room", "chapel", "dairy")


def document(name: str, version: int = 1) -> Document:
    lines = (f"Version {version} of the {name} has a green door with lock {number}. " for number in range(3))
    return Document(name, "".join(lines), name)


def ends(client: Client, *documents: Document) -> list[str]:
    stages = [p.WhichOneof("stage") or "" for p in client.ingest(documents)]
    return [stage for stage in stages if stage in ("stored", "unchanged", "failed")]


def outdated(client: Client) -> int:
    return client.stats().corpus.outdated


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to pass")


def stored_models(directory: Path) -> set[str]:
    """The namespace tags that objects on disk have: one a tenant and model."""
    with DiskTier(directory / "store", 1 << 40) as tier:
        return {key.namespace for key, _ in tier.sizes()}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Documents are processed again only once it is set."""
    go_on = threading.Event()
    embed = Library.embed

    def waiting(library: Library, prepared: Prepared, *progress: Any) -> Prepared:
        if prepared.renews is not None:
            assert go_on.wait(60)
        return embed(library, prepared, *progress)

    monkeypatch.setattr(Library, "embed", waiting)
    yield go_on
    go_on.set()


def test_answers_go_on_while_documents_of_another_chunk_size_come_back(start: Start, held: threading.Event) -> None:
    server = start()
    with Client(server.address) as client:
        assert ends(client, *map(document, NAMES)) == ["stored"] * 4
        chunks = client.stats().corpus.chunks
    server.stop()
    server = start(rag=SMALLER)
    with Client(server.address) as client:
        assert outdated(client) == 4
        with pytest.raises(ServiceError, match="all 4 documents are outdated; they are being processed again"):
            client.ask("Which door is green?")
        assert ends(client, document("gallery"), document("attic", version=2)) == ["stored"] * 2
        client.delete("dairy")
        found = {p.document_id for p in client.retrieve("Which door is green?", k=1000)}
        assert found == {"gallery", "attic"} and outdated(client) == 2
        assert client.ask("Which door is green?", plan=QUERY).report.chunks[0].outcome == "hit"
        held.set()
        wait_for(lambda: outdated(client) == 0)
        passages = client.retrieve("Which door is green?", k=1000)
        assert {p.document_id for p in passages} == {"gallery", "attic", "boiler room", "chapel"}
        assert {"Version 2" in p.text for p in passages if p.document_id == "attic"} == {True}
        assert client.stats().corpus.chunks > chunks
        answer = client.ask("Does the chapel have a green door?", plan=QUERY)
        assert {chunk.outcome for chunk in answer.report.chunks} == {"hit"}
        # Nothing is left of what they were cut into before.
        distinct = len({(p.document_id, p.text) for p in passages})
        wait_for(lambda: {t.name: t.objects for t in client.stats().engine.tiers}["disk"] == distinct)


def test_kv_of_the_model_before_goes(start: Start, tiny_model_dir: Path, tmp_path: Path) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, *map(document, NAMES))
    server.stop()
    before = stored_models(tmp_path / "data")
    server = start(engine=replace(config(tiny_model_dir, tmp_path).engine, sink=(5, 6)))
    with Client(server.address) as client:
        counts = client.stats().corpus
        assert counts.outdated == 0, "their tokens mean the same"
        wait_for(lambda: {t.name: t.objects for t in client.stats().engine.tiers}["disk"] == counts.chunks)
        wait_for(lambda: stored_models(tmp_path / "data").isdisjoint(before))
        answer = client.ask("Does the chapel have a green door?", plan=QUERY)
        assert {chunk.outcome for chunk in answer.report.chunks} == {"hit"}


def test_one_that_fails_is_logged_once_and_keeps_no_other(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, *map(document, NAMES))
    server.stop()
    again = Library.prepare_again

    def refusing(library: Library, document_id: str) -> Prepared | None:
        if document_id == "boiler room":
            raise InvalidDocument("text", "it", "another")
        return again(library, document_id)

    monkeypatch.setattr(Library, "prepare_again", refusing)
    with caplog.at_level(logging.INFO, "blend_server"):
        server = start(rag=SMALLER)
        with Client(server.address) as client:
            wait_for(lambda: "event=reindexed tenant=default renewed=3 failed=1 left=0" in caplog.messages)
            assert outdated(client) == 1
            assert ends(client, document("boiler room")) == ["stored"], "a caller still may"
    failures = [line for line in caplog.messages if line.startswith("event=reindex_failed")]
    assert failures == ["event=reindex_failed tenant=default document='boiler room' code=INVALID_ARGUMENT"]


def test_a_server_that_stops_half_way_goes_on_at_the_next_start(start: Start, held: threading.Event) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, *map(document, NAMES))
    server.stop()
    server = start(rag=SMALLER)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    held.set()
    stopping.join(60)
    assert not stopping.is_alive()
    server = start(rag=SMALLER)
    with Client(server.address) as client:
        wait_for(lambda: outdated(client) == 0)
        assert {p.document_id for p in client.retrieve("green door", k=1000)} == set(NAMES)


def test_a_tenant_that_is_processed_again_makes_room_for_one_that_calls(
    start: Start, tmp_path: Path, held: threading.Event
) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    tokens = {name: accounts.token(f"{name}-writer", name, "writer") for name in ("acme", "umbrella")}
    security = SecurityConfig(access_file=accounts.write(), max_open_tenants=1)
    server = start(security=security)
    for token in tokens.values():
        with Client(server.address, token=token) as client:
            assert ends(client, document("chapel")) == ["stored"]
    server.stop()
    server = start(security=security, rag=SMALLER)
    asked = threading.Thread(target=held.wait, args=(1,))  # the first tenant's document is under way by then
    asked.start()
    asked.join()
    held.set()
    for token in tokens.values():
        with Client(server.address, token=token) as client:
            wait_for(partial(_calm, client))


def _calm(client: Client) -> bool:
    try:
        return outdated(client) == 0
    except ServiceError as error:
        if error.code != "RESOURCE_EXHAUSTED":
            raise
        return False

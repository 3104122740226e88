"""A disk without space under KV, under the catalog, under the audit log: documents fail alone, answers go on."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blend.config import EngineConfig, SecurityConfig, StoreConfig
from blend.rag.catalog import Catalog
from blend.rag.library import Library
from blend.store.fileio import FileIO
from blend.types import Plan
from blend_server import audit, ingestion
from blend_server.client import Client, Document, ServiceError
from blend_server.server import BlendServer
from tests.server.faults import wait_for

MiB = 1 << 20
LIGHT = Document("light", "The lighthouse was built in 1888. " * 8, "Lighthouse")
FERRY = Document("ferry", "The ferry leaves the north pier at nine. It carries forty cars. " * 8, "Ferry")
LATER = Document("light", "The lighthouse was built in 1902. " * 400, "Lighthouse")
QUERY = Plan("query", 0.15)
Start = Callable[..., BlendServer]


def end(client: Client, document: Document) -> tuple[str, str]:
    """The last stage of a document, and the code where it failed."""
    *_, last = client.ingest([document])
    return last.WhichOneof("stage") or "", last.failed.code


def objects(client: Client) -> int:
    return int({tier.name: tier.objects for tier in client.stats().engine.tiers}["disk"])


def outcomes(client: Client, question: str = "When was it built?") -> set[str]:
    return {chunk.outcome for chunk in client.ask(question, plan=QUERY, max_new_tokens=2).report.chunks}


def shown(client: Client) -> list[tuple[str, int, int]]:
    return [(document.id, document.chunks, document.content_bytes) for document in client.documents()]


@pytest.fixture
def no_space(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is set, the disk under the stored KV takes nothing more."""
    full = threading.Event()

    def failing(name: str) -> None:
        method = getattr(FileIO, name)

        def call(*arguments: Any) -> Any:
            if full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            return method(*arguments)

        monkeypatch.setattr(FileIO, name, call)

    for name in ("pwrite", "truncate", "mkdir"):
        failing(name)
    yield full
    full.clear()


def test_kv_goes_to_memory_where_the_disk_is_full(start: Start, no_space: threading.Event) -> None:
    server = start()
    with Client(server.address) as client:
        assert end(client, LIGHT) == ("stored", "")
        before = objects(client)
        no_space.set()
        assert end(client, FERRY) == ("stored", "")
        assert outcomes(client) == {"hit"}
        assert objects(client) == before
        client.delete("ferry")
        no_space.clear()
        assert end(client, FERRY) == ("stored", "")
        assert outcomes(client, "When does the ferry leave?") == {"hit"}
        assert objects(client) > before


def test_a_document_fails_alone_where_no_tier_takes_its_kv(
    start: Start, no_space: threading.Event, tiny_model_dir: Path
) -> None:
    store = StoreConfig(host_bytes=0, disk_bytes=64 * MiB, fsync=False)
    server = start(engine=EngineConfig(model=str(tiny_model_dir), dtype="float32", store=store))
    with Client(server.address) as client:
        assert end(client, LIGHT) == ("stored", "")
        before, held = shown(client), objects(client)
        no_space.set()
        for document in (FERRY, LATER):
            stage, code = end(client, document)
            assert stage == "failed"
            assert code in {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
            assert shown(client) == before
            assert outcomes(client) == {"hit"}
        client.delete("light")  # which makes room
        assert shown(client) == []
        no_space.clear()
        assert end(client, LIGHT) == ("stored", "")
        assert (shown(client), objects(client)) == (before, held)
        assert outcomes(client) == {"hit"}


@pytest.fixture
def catalogs(monkeypatch: pytest.MonkeyPatch) -> list[Catalog]:
    """The catalogs of servers that are started from now on."""
    found: list[Catalog] = []
    opened = Library.__init__

    def opening(library: Library, *arguments: Any) -> None:
        opened(library, *arguments)
        found.append(library._catalog)

    monkeypatch.setattr(Library, "__init__", opening)
    monkeypatch.setattr(ingestion, "_RETRY_SECONDS", 0.05)
    return found


def fill(catalog: Catalog, full: bool) -> None:
    """Have a catalog's file take nothing more, as SQLite has it on a full disk; or everything again."""
    with catalog._lock:
        (free,) = catalog._db.execute("PRAGMA freelist_count").fetchone()
        (pages,) = catalog._db.execute("PRAGMA page_count").fetchone()
        assert not full or free == 0
        catalog._db.execute(f"PRAGMA max_page_count = {pages if full else 1 << 30}")


@pytest.mark.parametrize("stage", ["announce", "commit"])
def test_a_document_fails_alone_where_the_catalog_has_no_room(
    start: Start, catalogs: list[Catalog], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    server = start()
    with Client(server.address) as client:
        assert end(client, LIGHT) == ("stored", "")
        before, held = shown(client), objects(client)
        method = getattr(Library, stage)

        def filling(*arguments: Any) -> Any:
            fill(catalogs[0], full=True)
            return method(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Library, stage, filling)
            assert end(client, LATER) == ("failed", "UNAVAILABLE")
        assert shown(client) == before
        assert outcomes(client) == {"hit"}
        fill(catalogs[0], full=False)
        wait_for(lambda: objects(client) == held)  # of what failed nothing is left
        assert end(client, LATER) == ("stored", "")
        assert outcomes(client) == {"hit"}
    server.stop()
    with Client(start().address) as client:
        assert [document.id for document in client.documents()] == ["light"]
        assert outcomes(client) == {"hit"}


def test_an_audit_log_that_cannot_be_written_fails_no_call(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(security=SecurityConfig(audit_file=tmp_path / "audit.log"))
    (handler,) = [one for one in audit.logger.handlers if isinstance(one, audit._File)]

    def failing(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(handler.stream, "write", failing, raising=False)
    with Client(server.address) as client:
        assert end(client, LIGHT) == ("stored", "")
        assert outcomes(client) == {"hit"}
        client.delete("light")
        with pytest.raises(ServiceError, match="no such document"):
            client.get("light")
    assert (tmp_path / "audit.log").read_bytes() == b""

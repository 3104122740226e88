"""Snapshots of running servers, and servers on what was restored from them."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from blend.config import SecurityConfig
from blend.errors import InvalidInput, NotFound, ObjectCorrupt, StoreError
from blend.rag.catalog import Catalog
from blend.types import Answer, Plan
from blend_server.client import Client, Document
from blend_server.server import BlendServer
from blend_server.snapshots import create, inspect, restore
from blend_server.snapshots.command import main
from tests.server.accounts import Accounts
from tests.server.conftest import config

Start = Callable[..., BlendServer]
Restored = Callable[..., AbstractContextManager[Client]]

QUERY = Plan("query", 0.15)


def document(number: int) -> Document:
    lines = (f"Record {number} says that door {line} is green and has {line + number} locks. " for line in range(4))
    return Document(f"record {number}", "".join(lines), f"Record {number}")


def ends(client: Client, *documents: Document) -> list[str]:
    stages = [p.WhichOneof("stage") or "" for p in client.ingest(documents)]
    return [stage for stage in stages if stage in ("stored", "unchanged", "failed")]


def answer(client: Client) -> Answer:
    return client.ask("How many locks has door 2 of record 1?", plan=QUERY)


@pytest.fixture
def restored(tiny_model_dir: Path, tmp_path: Path) -> Restored:
    """Restores a snapshot into a new directory and serves that inside a ``with`` block."""

    @contextmanager
    def serve(archive: Path, **options: bool) -> Iterator[Client]:
        directory = tmp_path / f"restored {len(list(tmp_path.iterdir()))}"
        restore(archive, directory, **options)
        with BlendServer(config(tiny_model_dir, directory)) as server, Client(server.address) as client:
            yield client

    return serve


@pytest.mark.parametrize("kv", [True, False])
def test_a_restored_directory_answers_as_the_one_before(
    start: Start,
    tmp_path: Path,
    restored: Restored,
    kv: bool,
) -> None:
    archive = tmp_path / "saved.tar"
    with Client(start().address) as client:
        ends(client, *map(document, range(3)))
        before, listed = answer(client), list(client.documents())
        manifest = create(tmp_path / "data", archive, kv=kv)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert manifest.tenants["default"].documents == 3
    assert (manifest.kv is not None and manifest.kv.objects == manifest.tenants["default"].chunks) == kv
    assert inspect(archive) == manifest
    with restored(archive) as client:
        assert list(client.documents()) == listed
        after = answer(client)
        assert [chunk.key for chunk in after.report.chunks] == [chunk.key for chunk in before.report.chunks]
        assert {chunk.outcome for chunk in after.report.chunks} == {"hit" if kv else "miss"}
        if kv:
            assert after.token_ids == before.token_ids
        # What was missing is computed where a document comes again, and the rest costs nothing.
        assert set(ends(client, *map(document, range(3)))) == {"unchanged"}
        assert answer(client).token_ids == before.token_ids


def test_a_snapshot_in_the_midst_of_an_ingest_is_whole(start: Start, tmp_path: Path, restored: Restored) -> None:
    done = 0
    half = threading.Event()

    def ingest(client: Client) -> None:
        nonlocal done
        for progress in client.ingest(map(document, range(40))):
            done += progress.WhichOneof("stage") == "stored"
            if done == 10:
                half.set()

    with Client(start().address) as client:
        loading = threading.Thread(target=ingest, args=(client,))
        loading.start()
        assert half.wait(60)
        told = done
        manifests = [create(tmp_path / "data", tmp_path / f"{number}.tar", kv=True) for number in range(2)]
        loading.join(120)
        assert done == 40
    assert told <= manifests[0].tenants["default"].documents <= manifests[1].tenants["default"].documents
    with restored(tmp_path / "0.tar") as client:
        saved = manifests[0].tenants["default"]
        listed = list(client.documents())
        assert len(listed) == saved.documents
        passages = client.retrieve("Which door is green?", k=1000)
        assert len(passages) == saved.chunks == sum(found.chunks for found in listed)
        assert {chunk.outcome for chunk in answer(client).report.chunks} == {"hit"}
        outcomes = ends(client, *map(document, range(40)))
        assert outcomes.count("unchanged") == saved.documents and outcomes.count("stored") == 40 - saved.documents
        objects = {tier.name: tier.objects for tier in client.stats().engine.tiers}["disk"]
        assert objects == client.stats().corpus.chunks, "no KV came along that no document has"


def test_every_tenant_is_in_it_and_keeps_its_own(tmp_path: Path, start: Start, tiny_model_dir: Path) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    tokens = {name: accounts.token(f"{name}-writer", name, "writer") for name in ("acme", "umbrella")}
    security = SecurityConfig(access_file=accounts.write())
    server = start(security=security)
    for number, token in enumerate(tokens.values()):
        with Client(server.address, token=token) as client:
            ends(client, document(number))
    manifest = create(tmp_path / "data", tmp_path / "saved.tar", kv=True)
    assert {name: size.documents for name, size in manifest.tenants.items()} == {"default": 0, "acme": 1, "umbrella": 1}
    restore(tmp_path / "saved.tar", tmp_path / "other")
    with BlendServer(config(tiny_model_dir, tmp_path / "other", security=security)) as server:
        for number, token in enumerate(tokens.values()):
            with Client(server.address, token=token) as client:
                assert [found.id for found in client.documents()] == [f"record {number}"]
                assert client.ask("Which?", plan=QUERY).report.chunks[0].outcome == "hit"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "other").rglob("*") if path.is_file()}
    assert modes <= {0o600, 0o644}
    assert stat.S_IMODE((tmp_path / "other/store/secret").stat().st_mode) == 0o600


# --------------------------------------------------------------------------------- without a server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with an empty catalog."""
    (tmp_path / "data/library").mkdir(parents=True)
    Catalog(tmp_path / "data/library/catalog.sqlite3").close()
    return tmp_path / "data"


def test_neither_snapshot_nor_directory_is_written_over(data: Path, tmp_path: Path) -> None:
    archive = tmp_path / "saved.tar"
    create(data, archive)
    with pytest.raises(InvalidInput, match="not there yet"):
        create(data, archive)
    with pytest.raises(InvalidInput, match="missing or empty"):
        restore(archive, data)
    before = sorted(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    restore(archive, tmp_path / "empty")
    assert (tmp_path / "empty/library/catalog.sqlite3").is_file()
    restore(archive, tmp_path / "deep/down")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "empty", tmp_path / "deep"])


def test_what_is_no_data_directory_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="data directory"):
        create(tmp_path / "none", tmp_path / "saved.tar")
    with pytest.raises(NotFound, match="store"):
        create(data, tmp_path / "saved.tar", kv=True)
    with pytest.raises(StoreError):
        create(data, tmp_path / "none/saved.tar")
    (data / "library/catalog.sqlite3").write_bytes(b"no database, and long enough to look like one" * 100)
    with pytest.raises(ObjectCorrupt):
        create(data, tmp_path / "saved.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_the_command(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, other = str(tmp_path / "saved.tar"), str(tmp_path / "other")
    assert main(["create", str(data), archive]) == 0
    assert "tenant default: 0 documents" in capsys.readouterr().out
    assert main(["show", archive, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tenants"]["default"]["documents"] == 0
    assert main(["restore", archive, other]) == 0
    assert main(["restore", archive, other]) == 2
    assert "missing or empty" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "none.tar")]) == 2
    assert main(["show", str(data / "library/catalog.sqlite3")]) == 1
    assert "no snapshot" in capsys.readouterr().err
    assert os.listdir(other) == ["library"]

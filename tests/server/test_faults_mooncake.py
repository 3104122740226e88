"""A Mooncake store that goes and comes back under a service: documents come in and answers go out all the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend.config import EngineConfig, StoreConfig
from blend.types import Plan
from blend_server.client import Client, Document
from blend_server.server import BlendServer
from tests.server.conftest import config
from tests.server.faults import wait_for
from tests.store.mooncake_server import Master, Owner, config_for, master

__all__ = ["master"]
pytestmark = pytest.mark.slow
MiB = 1 << 20
QUERY = Plan("query", 0.15)


def document(number: int) -> Document:
    return Document(f"record {number}", f"Record {number} tells that mill {number} has two wheels.", f"Record {number}")


def down(client: Client) -> str:
    """Why the store cannot be used, empty where it can."""
    return str({tier.name: tier.down for tier in client.stats().engine.tiers}["mooncake"])


def takes(client: Client, number: int) -> None:
    """Take a document in and answer a question about it."""
    *_, last = client.ingest([document(number)])
    assert last.WhichOneof("stage") == "stored", last
    answer = client.ask(f"How many wheels has mill {number}?", k=1, plan=QUERY, max_new_tokens=4)
    assert {chunk.outcome for chunk in answer.report.chunks} == {"hit"}


def test_it_goes_and_comes_back(master: Master, tiny_model_dir: Path, tmp_path: Path) -> None:
    owner = Owner(master, 64 * MiB)
    mooncake = config_for(master, prefix="lost", staging_bytes=16 * MiB, deadline_seconds=1.0)
    store = StoreConfig(host_bytes=64 * MiB, disk_bytes=0, secret=b"the secret of the service", mooncake=mooncake)
    engine = EngineConfig(model=str(tiny_model_dir), dtype="float32", store=store)
    with (
        BlendServer(config(tiny_model_dir, tmp_path / "data", engine=engine)) as server,
        Client(server.address) as client,
    ):
        takes(client, 0)
        assert down(client) == ""
        owner.kill()
        master.kill()
        takes(client, 1)
        wait_for(lambda: down(client) != "")
        takes(client, 2)
        client.delete("record 1")
        assert client.ask("How many wheels has mill 0?", k=2, plan=QUERY, max_new_tokens=4).report.cached > 0
        master.start()
        again = Owner(master, 64 * MiB)
        wait_for(lambda: down(client) == "")
        takes(client, 3)
        assert sorted(found.id for found in client.documents()) == ["record 0", "record 2", "record 3"]
        assert not server.failed.is_set()
    again.stop()

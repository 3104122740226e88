"""Nothing crosses between tenants; each has its quotas; a flood of one leaves room for the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.config import EngineConfig, SecurityConfig, StoreConfig
from blend.engine import Engine
from blend.errors import ResourceExhausted
from blend.rag.library import Library
from blend.types import Plan
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.places import Places
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.faults import Hold

MiB = 1 << 20
QUERY = Plan("query", 0.15)
PLAN = "The ferry leaves the north pier at nine. "
Start = Callable[..., BlendServer]


def document(name: str, text: str = PLAN) -> Document:
    return Document(name, text, "Plan")


def ends(client: Client, *documents: Document) -> list[pb.IngestProgress]:
    """The last stage of each document."""
    last = {"stored", "unchanged", "failed"}
    return [p for p in client.ingest(documents) if p.WhichOneof("stage") in last]


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to pass")


class House:
    """A server with the tenants ``acme`` and ``umbrella``, a writer of each, and an administrator of ``acme``."""

    def __init__(self, directory: Path, start: Start) -> None:
        self.accounts = Accounts(directory / "access.yaml")
        self.tokens = {
            "acme": self.accounts.token("acme-writer", "acme", "writer"),
            "umbrella": self.accounts.token("umbrella-writer", "umbrella", "writer"),
            "default": self.accounts.token("default-writer", "default", "writer"),
            "admin": self.accounts.token("acme-admin", "acme", "admin"),
        }
        self._start = start
        self._clients = ExitStack()

    def open(self, **changes: Any) -> BlendServer:
        security = SecurityConfig(access_file=self.accounts.write(), max_open_tenants=changes.pop("most_open", 64))
        self.server = self._start(security=security, **changes)
        return self.server

    def client(self, who: str) -> Client:
        return self._clients.enter_context(Client(self.server.address, token=self.tokens[who], retries=Retries.none()))

    def close(self) -> None:
        self._clients.close()


@pytest.fixture
def house(tmp_path: Path, start: Start) -> Iterator[House]:
    made = House(tmp_path, start)
    yield made
    made.close()


# ------------------------------------------------------------------------------------------ nothing crosses


def test_what_one_tenant_has_is_nowhere_for_another(house: House) -> None:
    house.open()
    acme, umbrella = house.client("acme"), house.client("umbrella")
    ends(acme, document("plan", "Acme's vault opens at dawn."))
    ends(umbrella, document("other", "Umbrella's gate is green."))

    for missing in (lambda: umbrella.get("plan"), lambda: umbrella.delete("plan")):
        with pytest.raises(ServiceError) as raised:
            missing()
        assert raised.value.code == "NOT_FOUND"
    assert [d.id for d in acme.documents()] == ["plan"]
    assert [d.id for d in umbrella.documents()] == ["other"]
    assert {p.document_id for p in umbrella.retrieve("When does the vault open?", k=1000)} == {"other"}
    passages, *_ = umbrella.answer("When does the vault open?", k=1000, plan=QUERY, max_new_tokens=1)
    assert isinstance(passages, pb.Passages)
    assert {p.document_id for p in passages.passages} == {"other"}


def test_equal_documents_of_two_tenants_share_no_kv(house: House) -> None:
    house.open()
    acme, umbrella = house.client("acme"), house.client("umbrella")
    first, second = ends(acme, document("plan")), ends(umbrella, document("plan"))
    assert first[0].stored.computed_chunks == second[0].stored.computed_chunks == 1
    keys = [client.ask("When?", plan=QUERY, max_new_tokens=1).report.chunks[0] for client in (acme, umbrella)]
    assert {chunk.outcome for chunk in keys} == {"hit"}
    assert keys[0].key != keys[1].key
    assert acme.delete("plan") == 1
    assert umbrella.ask("When?", plan=QUERY, max_new_tokens=1).report.chunks[0].outcome == "hit"


def test_the_same_id_is_another_document_for_each_tenant(house: House) -> None:
    house.open()
    acme, umbrella = house.client("acme"), house.client("umbrella")
    ends(acme, document("plan", "The first text."))
    ends(umbrella, document("plan", "The second text, which is longer."))
    assert acme.get("plan").sha256 != umbrella.get("plan").sha256
    acme.delete("plan")
    assert umbrella.get("plan").id == "plan"


def test_pages_of_one_tenant_lead_nowhere_in_another(house: House) -> None:
    house.open()
    acme, umbrella = house.client("acme"), house.client("umbrella")
    ends(acme, *(document(f"a{n}", f"Fact {n}.") for n in range(3)))
    ends(umbrella, *(document(f"u{n}", f"Fact {n}.") for n in range(3)))
    assert [d.id for d in acme.documents(page_size=1)] == ["a0", "a1", "a2"]
    assert [d.id for d in umbrella.documents(page_size=1)] == ["u0", "u1", "u2"]


def test_figures_are_a_tenants_own_and_an_administrators_are_the_servers(house: House) -> None:
    house.open()
    acme, umbrella, admin = house.client("acme"), house.client("umbrella"), house.client("admin")
    ends(acme, document("plan"), document("more", "Another text."))
    acme.ask("When?", plan=QUERY, max_new_tokens=1)
    of_umbrella, of_acme, whole = umbrella.stats(), acme.stats(), admin.stats()
    assert (of_umbrella.corpus.documents, of_acme.corpus.documents, whole.corpus.documents) == (0, 2, 2)
    assert [tier.used_bytes for tier in of_umbrella.engine.tiers] == [0, 0]
    assert of_umbrella.engine.requests == 0
    assert all(0 < tier.used_bytes <= whole.engine.tiers[1].used_bytes for tier in of_acme.engine.tiers)
    assert of_acme.engine.requests == 1
    assert not of_umbrella.engine.details
    assert not of_acme.engine.details
    assert of_umbrella.limits == of_acme.limits == whole.limits
    assert whole.engine.details["counters"]["precomputed"] == 2
    assert whole.engine.tiers[1].capacity_bytes == 256 * MiB


def test_a_message_cannot_name_a_tenant() -> None:
    names = {field.name for message in pb.DESCRIPTOR.message_types_by_name.values() for field in message.fields}
    assert not {name for name in names if "tenant" in name or "namespace" in name}


# -------------------------------------------------------------------------------------- open, closed, kept


def test_documents_of_all_tenants_outlive_the_server_and_the_default_ones_come_from_before(
    house: House, start: Start, tmp_path: Path
) -> None:
    server = start()
    with Client(server.address) as client:
        ends(client, document("old"))
    server.stop()
    server = house.open()
    ends(house.client("acme"), document("plan"))
    assert [d.id for d in house.client("default").documents()] == ["old"]
    assert house.client("default").ask("When?", plan=QUERY).report.chunks[0].outcome == "hit"
    server.stop()
    house.open()
    assert [d.id for d in house.client("acme").documents()] == ["plan"]
    assert house.client("acme").ask("When?", plan=QUERY).report.chunks[0].outcome == "hit"
    assert (tmp_path / "data" / "tenants" / "acme" / "catalog.sqlite3").exists()


def test_a_bounded_number_of_tenants_is_open_and_idle_ones_make_room(house: House) -> None:
    house.open(most_open=2)  # one of them is the default tenant, until there is another
    for name in ("acme", "umbrella", "default", "acme", "umbrella"):
        client = house.client(name)
        assert ends(client, document(name))[0].WhichOneof("stage") in {"stored", "unchanged"}
        assert [d.id for d in client.documents()] == [name]


def test_a_tenant_that_is_used_is_not_closed_for_another(house: House) -> None:
    house.open(most_open=1)
    done = threading.Event()

    def waiting() -> Iterable[Document]:
        yield document("plan")
        done.wait(30)

    wait_for(lambda: _code(house.client("acme").stats) == "OK")
    stream = house.client("acme").ingest(waiting())
    next(stream)
    with pytest.raises(ServiceError, match="1 tenants are being served") as raised:
        house.client("umbrella").stats()
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    assert raised.value.retry_seconds == 1.0
    done.set()
    list(stream)
    wait_for(lambda: _code(house.client("umbrella").stats) == "OK")


def test_kv_that_a_tenants_last_run_left_behind_goes_at_the_next_start(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = house.open()
    client = house.client("acme")
    ends(client, document("plan"))
    forget = Engine.forget_keys

    def broken(*_: Any) -> int:
        raise ResourceExhausted("not now")

    monkeypatch.setattr(Engine, "forget_keys", broken)
    client.delete("plan")
    server.stop()
    monkeypatch.setattr(Engine, "forget_keys", forget)
    house.open()
    admin = house.client("admin")
    wait_for(lambda: admin.stats().engine.tiers[1].objects == 0)


def test_one_tenants_damaged_files_are_its_own_trouble(house: House, tmp_path: Path) -> None:
    damaged = tmp_path / "data" / "tenants" / "acme"
    damaged.mkdir(parents=True)
    (damaged / "catalog.sqlite3").write_bytes(b"no database" * 100)
    house.open()
    assert _code(house.client("acme").stats) == "UNAVAILABLE"
    assert ends(house.client("umbrella"), document("plan"))[0].WhichOneof("stage") == "stored"


# ----------------------------------------------------------------------------------------------- quotas


def test_a_quota_of_documents_is_named_when_it_is_used_up(house: House) -> None:
    house.accounts.entries["tenants"] = {"acme": {"documents": 2}}
    house.open()
    acme = house.client("acme")
    seen = ends(acme, *(document(f"d{n}", f"Fact {n}.") for n in range(3)))
    assert [p.WhichOneof("stage") for p in seen] == ["stored", "stored", "failed"]
    assert seen[2].failed.code == "RESOURCE_EXHAUSTED"
    assert "quota documents: tenant 'acme' has 2" in seen[2].failed.message
    assert ends(acme, document("d1", "Changed."))[0].WhichOneof("stage") == "stored"
    assert ends(acme, document("d1", "Changed."))[0].WhichOneof("stage") == "unchanged"
    acme.delete("d0")
    assert ends(acme, document("d2", "Fact 2."))[0].WhichOneof("stage") == "stored"
    assert [ends(house.client("umbrella"), document(f"d{n}"))[0].WhichOneof("stage") for n in range(3)] == [
        "stored"
    ] * 3


def test_a_quota_of_bytes_counts_texts_and_holds_for_streams_side_by_side(house: House) -> None:
    house.accounts.entries["quotas"] = {"bytes": 10 * len(PLAN)}
    house.open()
    outcomes: list[pb.IngestProgress] = []

    def ingest(place: int) -> None:
        client = house.client("acme")
        outcomes.extend(ends(client, *(document(f"d{place}-{n}") for n in range(4))))

    streams = [threading.Thread(target=ingest, args=(place,)) for place in range(4)]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()
    stored = [p for p in outcomes if p.WhichOneof("stage") == "stored"]
    failed = [p for p in outcomes if p.WhichOneof("stage") == "failed"]
    assert len(outcomes) == 16
    assert 0 < len(stored) <= 10
    assert all("quota bytes" in p.failed.message for p in failed)
    assert house.client("acme").stats().corpus.content_bytes == len(stored) * len(PLAN)


def test_a_quota_holds_for_a_document_whose_caller_left_as_it_was_stored(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.accounts.entries["tenants"] = {"acme": {"documents": 1}}
    house.open()
    acme, reached, go_on = house.client("acme"), threading.Event(), threading.Event()
    commit = Library.commit

    def slow(*arguments: Any) -> Any:
        reached.set()
        go_on.wait(30)
        return commit(*arguments)

    monkeypatch.setattr(Library, "commit", slow)
    stream = acme.ingest([document("left")])
    for progress in stream:
        if progress.WhichOneof("stage") == "computed" and progress.computed.done == progress.computed.total:
            break
    assert reached.wait(30)
    stream.close()
    time.sleep(0.3)
    seen: list[pb.IngestProgress] = []
    other = threading.Thread(target=lambda: seen.extend(ends(acme, document("other"))))
    other.start()
    time.sleep(0.3)
    go_on.set()
    other.join()
    assert [p.WhichOneof("stage") for p in seen] == ["failed"]
    assert "quota documents" in seen[0].failed.message
    assert [d.id for d in acme.documents()] == ["left"]


def test_a_quota_of_requests_counts_calls_that_are_under_way(house: House) -> None:
    house.accounts.entries["tenants"] = {"acme": {"requests": 2}}
    house.open()
    acme, done = house.client("acme"), threading.Event()

    def waiting() -> Iterable[Document]:
        yield document("plan")
        done.wait(30)

    streams = []
    stream = acme.ingest(waiting())
    next(stream)
    streams.append(stream)
    wait_for(lambda: _code(acme.stats) == "OK")
    stream = acme.ingest(waiting())
    next(stream)
    streams.append(stream)
    with pytest.raises(ServiceError, match="quota requests: tenant 'acme' has 2 calls under way") as raised:
        acme.stats()
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    assert raised.value.retry_seconds == 1.0
    assert _code(house.client("umbrella").stats) == "OK"
    done.set()
    for stream in streams:
        list(stream)


def test_a_quota_of_kv_holds_for_each_tenant(house: House, tiny_model_dir: Path) -> None:
    store = StoreConfig(host_bytes=64 * MiB, disk_bytes=64 * MiB, fsync=False, tenant_quota_bytes=512 << 10)
    house.open(engine=EngineConfig(model=str(tiny_model_dir), dtype="float32", store=store))
    acme = house.client("acme")
    ends(acme, *(document(f"d{n}", f"Fact {n}. " * 40) for n in range(12)))
    tiers = acme.stats().engine.tiers
    assert all(0 < tier.used_bytes <= tier.capacity_bytes == 512 << 10 for tier in tiers)


# ------------------------------------------------------------------------------------------------- floods


def test_a_flood_of_one_tenant_leaves_places_for_another(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.open(max_queue=5)
    done = threading.Event()
    embed = Library.embed

    def slow(library: Library, *arguments: Any) -> Any:
        if library.namespace == "acme":
            done.wait(60)
        return embed(library, *arguments)

    monkeypatch.setattr(Library, "embed", slow)
    acme, umbrella = house.client("acme"), house.client("umbrella")
    streams = []
    for _ in range(3):
        streams.append(acme.ingest([document("plan")]))
        next(streams[-1])
    with pytest.raises(ServiceError, match="tenant 'acme' holds 3 places") as raised:
        acme.ask("When?")
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    assert ends(umbrella, document("other"))[0].WhichOneof("stage") == "stored"
    assert umbrella.ask("When?", plan=QUERY, max_new_tokens=1).report.tokens > 0
    done.set()
    for stream in streams:
        list(stream)
    wait_for(lambda: _code(lambda: acme.ask("When?", plan=QUERY, max_new_tokens=1)) == "OK")


def test_a_flood_of_questions_leaves_a_thread_for_another(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.open()
    acme, umbrella, go_on = house.client("acme"), house.client("umbrella"), threading.Event()
    ends(acme, document("plan"))
    ends(umbrella, document("plan"))
    find = Library.retrieve

    def slow(library: Library, *arguments: Any) -> Any:
        if library.namespace == "acme":
            go_on.wait(60)
        return find(library, *arguments)

    monkeypatch.setattr(Library, "retrieve", slow)
    flood = [threading.Thread(target=acme.retrieve, args=("When?",)) for _ in range(12)]
    for thread in flood:
        thread.start()
    time.sleep(0.2)
    assert len(umbrella.retrieve("When?")) == 1
    assert all(thread.is_alive() for thread in flood)
    go_on.set()
    for thread in flood:
        thread.join()


def test_a_flood_of_questions_about_figures_leaves_threads_for_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.open()
    acme, umbrella = house.client("admin"), house.client("umbrella")
    ends(umbrella, document("plan"))
    flood: list[threading.Thread] = []
    for method, call in (("stats", acme.stats), ("reset_shadow", acme.reset_quality)):
        hold = Hold(monkeypatch, Engine, method)
        flood += [threading.Thread(target=call) for _ in range(6)]
        for thread in flood[-6:]:
            thread.start()
        assert hold.entered.wait(60)
        assert umbrella.retrieve("When does it leave?")
        assert all(thread.is_alive() for thread in flood[-6:])
        hold.let_go()
    for thread in flood:
        thread.join()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=80), st.integers(1, 20))
def test_places_are_never_more_than_there_are_and_one_stays_for_whoever_has_none(
    calls: list[tuple[str, bool]], total: int
) -> None:
    places = Places(total, "full")
    held: dict[str, list[ExitStack]] = {name: [] for name in "abcd"}
    for name, comes in calls:
        count = sum(map(len, held.values()))
        if not comes:
            if held[name]:
                held[name].pop().close()
            continue
        stack = ExitStack()
        try:
            stack.enter_context(places.hold(name))
        except ResourceExhausted:
            assert len(held[name]) >= total - count
            continue
        assert len(held[name]) < total - count
        held[name].append(stack)
        assert places.held_by(name) == len(held[name])
    assert sum(map(len, held.values())) <= total
    for stacks in held.values():
        for stack in stacks:
            stack.close()
    assert all(places.held_by(name) == 0 for name in held)


def test_two_that_flood_get_a_third_each() -> None:
    places, stack = Places(30, "full"), ExitStack()
    with stack:
        for _ in range(30):
            for name in "ab":
                with suppress(ResourceExhausted):
                    stack.enter_context(places.hold(name))
        assert (places.held_by("a"), places.held_by("b")) == (10, 10)
        stack.enter_context(places.hold("c"))


def _code(call: Callable[[], Any]) -> str:
    try:
        call()
    except ServiceError as error:
        return error.code
    return "OK"

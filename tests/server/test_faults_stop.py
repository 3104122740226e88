"""A server that is told to stop, or is killed, while answers go out and documents come and go; and one at rest."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from blend.types import Answer, Plan
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.server import BlendServer
from tests.server.faults import Serving, wait_for

QUERY = Plan("query", 0.15)
DOCUMENTS = 12
GONE = {"UNAVAILABLE", "CANCELLED"}


def document(number: int, version: int) -> Document:
    """A document of some chunks that no other one has."""
    text = " ".join(f"Version {version} of record {number} says {line} of the mill." for line in range(8))
    return Document(f"record {number:02}", text, f"Record {number}")


@dataclass
class Load:
    """Clients that ask, ingest and delete, and what they were told."""

    address: str
    ended: threading.Event = field(default_factory=threading.Event)
    answers: int = 0
    broken: list[str] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        """Begin with all documents there, and go on until the server does not."""
        with Client(self.address) as client:
            for progress in client.ingest([document(number, 0) for number in range(DOCUMENTS)]):
                assert progress.WhichOneof("stage") != "failed"
        self.stored = {document(number, 0).id: 0 for number in range(DOCUMENTS)}
        works = [self.ask] * 6 + [self.ingest, self.delete]
        self.threads = [threading.Thread(target=self.run, args=(work, place)) for place, work in enumerate(works)]
        for thread in self.threads:
            thread.start()

    def run(self, work: Callable[[Client, int], None], place: int) -> None:
        with Client(self.address, retries=Retries.none()) as client:
            while not self.ended.is_set():
                try:
                    work(client, place)
                except ServiceError as error:
                    self.broken.append(error.code)
                    return

    def ask(self, client: Client, place: int) -> None:
        *_, last = client.answer(f"What does record {place} say?", plan=QUERY, max_new_tokens=120)
        assert isinstance(last, Answer)
        assert len(last.token_ids) == 120 or last.finish_reason != "length"
        self.answers += 1

    def ingest(self, client: Client, place: int) -> None:
        """New versions of the first half, again and again."""
        for number in range(DOCUMENTS // 2):
            new = document(number, self.stored[document(number, 0).id] + 1)
            self.unknown.add(new.id)
            *_, last = client.ingest([new])
            if last.WhichOneof("stage") != "stored":
                raise ServiceError(last.failed.code, last.failed.message)
            self.stored[new.id] += 1
            self.unknown.discard(new.id)

    def delete(self, client: Client, place: int) -> None:
        """The second half, one after another."""
        for number in range(DOCUMENTS // 2, DOCUMENTS - 1):
            name = document(number, 0).id
            if name not in self.deleted:
                time.sleep(0.1)
                self.unknown.add(name)
                client.delete(name)
                self.unknown.discard(name)
                self.deleted.add(name)
        self.ended.wait(0.05)

    def end(self) -> None:
        """Return once every call has ended, one way or another."""
        self.ended.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a call hangs"


def check(address: str, load: Load, lost: bool) -> None:
    """What was told is so, whatever else there is is whole, and no KV is kept of what is not.

    ``lost``: KV that only memory had may be gone.
    """
    with Client(address) as client:
        listed = {found.id: found for found in client.documents()}
        assert not load.deleted & listed.keys()
        assert load.stored.keys() - load.deleted - load.unknown <= listed.keys()
        parts: dict[str, dict[int, str]] = {}
        for passage in client.retrieve("What does the mill say?", k=1000):
            parts.setdefault(passage.document_id, {})[passage.ordinal] = passage.text
        assert parts.keys() == listed.keys()
        for name, found in listed.items():
            assert sorted(parts[name]) == list(range(found.chunks))
            text = " ".join(parts[name][ordinal] for ordinal in range(found.chunks))
            version = load.stored[name]
            whole = {str(document(int(name.split()[1]), version + more).content) for more in (0, name in load.unknown)}
            assert text in whole
        chunks = sum(found.chunks for found in listed.values())
        wait_for(lambda: objects(client) <= chunks)
        if not lost:
            assert objects(client) == chunks
        outcomes = {chunk.outcome for chunk in client.ask("What does record 1 say?", k=10, plan=QUERY).report.chunks}
        assert outcomes <= ({"hit", "miss"} if lost else {"hit"})


def objects(client: Client) -> int:
    return int({tier.name: tier.objects for tier in client.stats().engine.tiers}["disk"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["stopped", "stopped at once", "killed"])
def test_under_load(serving: Serving, how: str) -> None:
    drain = 60 if how == "stopped" else 0
    server = serving("--drain-seconds", str(drain))
    load = Load(server.address)
    load.begin()
    wait_for(lambda: load.answers > 3 and max(load.stored.values()) > 0 and len(load.deleted) > 1)
    server.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    status = server.process.wait(drain + 30)
    load.end()
    assert status == (-signal.SIGKILL if how == "killed" else 0), server.log.read_text()[-2000:]
    assert len(load.broken) >= len(load.threads) - 1  # there may be nothing left to delete
    assert set(load.broken) <= GONE
    if how != "killed":
        assert f"event=stopped drained={'true' if how == 'stopped' else 'false'}" in server.log.read_text()
        assert "incident=" not in server.log.read_text()
    check(serving().address, load, lost=how == "killed")


def test_a_server_at_rest_uses_no_processor(start: Callable[..., BlendServer]) -> None:
    server = start()
    with Client(server.address) as client:
        list(client.ingest([document(0, 0)]))
        client.ask("What does record 0 say?", plan=QUERY)
        # Whatever the last call left to do in the background may take a moment.
        shares = []
        for _ in range(10):
            began, used = time.monotonic(), time.process_time()
            time.sleep(1.0)
            shares.append((time.process_time() - used) / (time.monotonic() - began))
            if shares[-1] < 0.05:
                break
    assert min(shares) < 0.05, shares

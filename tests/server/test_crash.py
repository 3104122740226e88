"""A server that is killed while it takes documents in: what it had acknowledged is whole, and nothing else shows."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic, sleep

import pytest

from blend.types import Answer, Plan
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.proto.blend.v1 import blend_pb2 as pb
from tests.server.faults import Served, Serving

ROUNDS = 8
DOCUMENTS = 24
PLAN = Plan("query", 0.15)
ROOMS = ("attic", "boiler room", "chapel", "dairy", "engine shed", "forge", "gallery", "hall")


def text_of(number: int, version: int) -> str:
    """A document of several chunks, every sentence of which names the document and its version."""
    return " ".join(
        f"In version {version} of record {number} the {ROOMS[(number + line) % len(ROOMS)]} has door {line}."
        for line in range(6 + number % 5)
    )


@dataclass
class Told:
    """What the client knows: which version of each document was sent, and which the server said it has stored."""

    sent: dict[str, set[int]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    chunks: dict[tuple[str, int], int] = field(default_factory=dict)

    def documents(self, rng: random.Random) -> list[Document]:
        """All documents in a random order; some of those that are stored in a new version."""
        found = []
        for number in rng.sample(range(DOCUMENTS), DOCUMENTS):
            name = f"record {number}"
            version = self.stored.get(name, 0)
            if name in self.stored and rng.random() < 0.25:
                version = max(self.sent[name]) + 1
            found.append(self.document(number, version))
        return found

    def document(self, number: int, version: int) -> Document:
        name = f"record {number}"
        self.sent.setdefault(name, set()).add(version)
        return Document(name, text_of(number, version), f"Record {number}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_acknowledged_outlives_kills_at_random_moments(serving: Serving) -> None:
    rng = random.Random(11)
    told = Told()
    early = 0
    for number in range(ROUNDS):
        server = serving()
        with Client(server.address, retries=Retries.none()) as client:
            check(client, told, ask=rng.sample(range(DOCUMENTS), 3))
            # In most rounds after some acknowledgements, in the others wherever it happens to be.
            after = None if number % 4 == 3 else rng.randint(1, 5)
            early += not ingest_until_killed(client, server, told, rng, after)
        server.kill()
    assert early < ROUNDS / 2, "most were killed after the first acknowledgement"
    server = serving()
    with Client(server.address) as client:
        check(client, told, ask=range(DOCUMENTS))
        whole = [told.document(number, told.stored.get(f"record {number}", 0)) for number in range(DOCUMENTS)]
        ends = [p for p in client.ingest(whole) if p.WhichOneof("stage") in ("stored", "unchanged", "failed")]
        assert [(p.document_id, p.failed.message) for p in ends if p.HasField("failed")] == []
        assert [p.document_id for p in ends] == [document.id for document in whole]
        for document, progress in zip(whole, ends, strict=True):
            told.stored[document.id] = version_of(document.content)
            assert progress.stored.chunks or progress.unchanged.chunks
        check(client, told, ask=range(DOCUMENTS), all_hits=True)
        assert client.stats().corpus.documents == DOCUMENTS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_documents_that_are_processed_again_outlive_kills(serving: Serving) -> None:
    told = Told()
    server = serving()
    with Client(server.address) as client:
        for progress in client.ingest([told.document(number, 0) for number in range(DOCUMENTS)]):
            if progress.WhichOneof("stage") == "stored":
                told.stored[progress.document_id] = 0
    server.kill()
    server = serving("--chunk-tokens", "64")
    with Client(server.address) as client:
        before = client.stats().corpus.outdated
        while (now := client.stats().corpus.outdated) == before and now:
            sleep(0.02)
    server.kill()
    server = serving("--chunk-tokens", "64")
    with Client(server.address) as client:
        assert client.stats().corpus.outdated < DOCUMENTS, "it goes on, and does not begin again"
        while client.stats().corpus.outdated:
            sleep(0.1)
        check(client, told, ask=range(DOCUMENTS), all_hits=True)
        passages = client.retrieve("Which door is in which room?", k=1000)
        distinct = len({(found.title, found.text) for found in passages})
        end = monotonic() + 60
        while {tier.name: tier.objects for tier in client.stats().engine.tiers}["disk"] != distinct:
            assert monotonic() < end, "nothing is left of what was broken off, nor of what was before"
            sleep(0.1)


def version_of(text: str | bytes) -> int:
    assert isinstance(text, str)
    (version,) = set(re.findall(r"version (\d+)", text))
    return int(version)


def ingest_until_killed(client: Client, server: Served, told: Told, rng: random.Random, after: int | None) -> int:
    """Ingest all documents until the server dies; return how many it had acknowledged."""
    documents = told.documents(rng)
    versions = {document.id: version_of(document.content) for document in documents}
    killer = threading.Timer(rng.uniform(0.02, 0.5), server.process.kill)
    if after is None:
        killer.start()
    acknowledged = 0
    try:
        for progress in client.ingest(documents):
            stage, name = progress.WhichOneof("stage"), progress.document_id
            assert stage != "failed", progress.failed.message
            if stage == "chunked":
                told.chunks[name, versions[name]] = progress.chunked.chunks
            if stage == "stored":
                told.stored[name] = versions[name]
                acknowledged += 1
                if acknowledged == after:
                    killer = threading.Timer(rng.uniform(0, 0.06), server.process.kill)
                    killer.start()
    except ServiceError as error:
        if error.code not in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL"):
            raise
    if killer.ident is None:  # there were fewer acknowledgements than that
        server.kill()
    else:
        killer.join()
    return acknowledged


def check(client: Client, told: Told, ask: object, all_hits: bool = False) -> None:
    """Every acknowledged document is listed, whole, and answers; whatever else is listed is whole, too."""
    listed = {document.id: document for document in client.documents()}
    assert told.stored.keys() <= listed.keys()
    passages: dict[str, dict[int, pb.Passage]] = {}
    if listed:
        for passage in client.retrieve("Which door is in which room?", k=1000):
            assert passage.ordinal not in passages.setdefault(passage.document_id, {})
            passages[passage.document_id][passage.ordinal] = passage
    assert passages.keys() == listed.keys(), "nothing is found of what is not listed, and all of what is"
    for name, document in listed.items():
        parts = passages[name]
        assert sorted(parts) == list(range(document.chunks))
        text = " ".join(parts[place].text for place in sorted(parts))
        number, version = int(name.split()[1]), version_of(text)
        assert version in told.sent[name]
        # One that was replaced when the server died is the old one or the new one.
        assert version >= told.stored.get(name, 0)
        want = text_of(number, version)
        assert text.split() == want.split()
        assert document.sha256 == sha256(want.encode()).hexdigest()
        assert document.chunks == told.chunks.get((name, version), document.chunks)
        told.stored[name] = version
    for number in ask:  # type: ignore[attr-defined]
        name = f"record {number}"
        if name not in listed:
            continue
        line = f"In version {told.stored[name]} of record {number} the {ROOMS[number % len(ROOMS)]} has door 0."
        *_, answer = client.answer(line, k=5, plan=PLAN)
        assert isinstance(answer, Answer)
        assert any(p.document_id == name for p in client.retrieve(line, k=5))
        outcomes = [chunk.outcome for chunk in answer.report.chunks]
        assert set(outcomes) <= {"hit", "miss"}
        assert all(outcome == "hit" for outcome in outcomes) or not all_hits

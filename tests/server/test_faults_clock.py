"""A wall clock that jumps by days while the server runs: only what people read as a date goes by it."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import blend
import blend_server
from blend.rag.library import Library
from blend.types import Plan
from blend_server.client import Client, Document
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub
from blend_server.server import BlendServer
from tests.server.faults import Hold

LIGHT = Document("light", "The lighthouse was built in 1888.", "Lighthouse")
FERRY = Document("ferry", "The ferry leaves the north pier at nine.", "Ferry")
SUNK = Document("ferry", "It sank.", "Ferry")
QUERY = Plan("query", 0.15)
DAY = 86400.0
DATES = {
    "blend/rag/catalog.py",  # when a document came
    "blend/shadow/quality.py",  # when answers were found to be worse than allowed
    "blend/store/diskspace.py",  # whether the time stamp of a directory is old enough to tell all changes
    "blend/store/events.py",  # when an event was published; nobody reckons with it
    "blend_server/audit.py",  # when a call was made
    "blend_server/auth.py",  # whether a token has expired
    "blend_server/operations/traces.py",  # when a span began
    "blend_server/snapshots/creating.py",  # when a snapshot was made
    "blend_server/service.py",  # since when the server runs
    "blend_server/tokens.py",  # when a token that is being made expires
}
"""Modules that ask for the date."""


@pytest.mark.parametrize("days", [3, -3, 4000])
def test_an_answer_keeps_its_deadline(
    tiny_server: BlendServer, client: Client, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    list(client.ingest([LIGHT]))
    hold = Hold(monkeypatch, Library, "retrieve")
    with grpc.insecure_channel(tiny_server.address) as channel:
        request = pb.AnswerRequest(question="When was it built?", max_new_tokens=4)
        events = BlendServiceStub(channel).Answer(request, timeout=120)  # type: ignore[no-untyped-call]
        assert hold.entered.wait(60)
        now = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + days * DAY)
            hold.let_go()
            *_, last = events
    assert last.answer.usage.completion_tokens == 4 or last.answer.finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("days", [400, -400, -30000])
def test_documents_come_and_answers_go_out(
    start: Callable[..., BlendServer], monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    server, now = start(), time.time
    with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        stub: Any = BlendServiceStub(channel)  # type: ignore[no-untyped-call]
        list(client.ingest([LIGHT, FERRY]))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + days * DAY)
            # Calls without a deadline, which this process's gRPC would reckon by the same clock.
            sent = [pb.Document(id=d.id, title=d.title, content=str(d.content).encode()) for d in (LIGHT, SUNK, FERRY)]
            stages = [p.WhichOneof("stage") for p in stub.Ingest(iter(sent))]
            ends = [stage for stage in stages if stage in ("stored", "unchanged", "failed")]
            assert ends == ["unchanged", "stored", "stored"]
            *_, last = stub.Answer(pb.AnswerRequest(question="When was it built?", k=2, plan=pb.Plan(method="query")))
        assert {chunk.outcome for chunk in last.answer.report.chunks} == {pb.OUTCOME_HIT}
        assert last.answer.report.timings.first_token_ms > 0
        assert [document.id for document in client.documents()] == ["ferry", "light"]
        client.delete("ferry")
    server.stop()
    with Client(start().address) as client:
        assert [document.id for document in client.documents()] == ["light"]
        assert client.ask("When was it built?", plan=QUERY).report.chunks[0].outcome == "hit"


def test_nothing_else_asks_for_the_date() -> None:
    """What measures a time goes by a clock that does not jump: ``monotonic`` or ``perf_counter``."""
    asking = set()
    for package in (blend, blend_server):
        assert package.__file__ is not None
        root = Path(package.__file__).parent
        for path in root.rglob("*.py"):
            name = path.relative_to(root.parent).as_posix()
            if not name.startswith("blend/eval/") and any(
                _asks(node) for node in ast.walk(ast.parse(path.read_text()))
            ):
                asking.add(name)
    assert asking == DATES


def _asks(node: Any) -> bool:
    """Whether this is ``time.time``, ``from time import time``, or a ``now`` or ``today`` of ``datetime``."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(
            name.name in ("time", "time_ns", "localtime", "gmtime") for name in node.names
        )
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id == "time" and node.attr in ("time", "time_ns", "localtime", "gmtime")) or (
            node.value.id in ("datetime", "date") and node.attr in ("now", "utcnow", "today")
        )
    return False

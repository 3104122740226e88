"""Documents through a router: every engine has them, whichever fails when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from blend.errors import TierUnavailable
from blend_server.client import Client, Document, ServiceError
from blend_server.router.journal import Journal
from blend_server.router.server import Router
from tests.server.router.conftest import Engines, ready
from tests.server.router.fakes import FakeEngine, wait_for

FERRY = Document("ferry", "It leaves at nine.")
LIGHT = Document("light", "It is red.")


def last(client: Client, *documents: Document) -> list[str]:
    """Ingest documents; return the last stage of each."""
    stages = {progress.index: progress.WhichOneof("stage") for progress in client.ingest(documents)}
    return [stages[index] for index in sorted(stages)]


def waiting(client: Client) -> dict[str, int]:
    told = client.stats().engine.details["router"]
    return {name: int(told[name]["waiting_changes"]) for name in ("a", "b")}


def test_documents_go_to_every_engine_and_come_from_any(client: Client, engines: Engines) -> None:
    assert last(client, FERRY, LIGHT) == ["stored", "stored"]
    assert engines[0].texts() == engines[1].texts() == {"ferry": b"It leaves at nine.", "light": b"It is red."}
    assert last(client, FERRY) == ["unchanged"]
    assert [document.id for document in client.documents(page_size=1)] == ["ferry", "light"]
    assert client.get("light").id == "light"
    assert client.delete("light") == 1
    assert engines[0].texts() == engines[1].texts() == {"ferry": b"It leaves at nine."}
    assert waiting(client) == {"a": 0, "b": 0}


def test_what_an_engine_refuses_no_engine_gets(client: Client, engines: Engines) -> None:
    assert last(client, Document("empty", ""), FERRY) == ["failed", "stored"]
    assert sum(engine.asked("Ingest") for engine in engines) == 3
    with pytest.raises(ServiceError, match="no such document") as raised:
        client.delete("nothing")
    assert raised.value.code == "NOT_FOUND"
    assert sum(engine.asked("DeleteDocument") for engine in engines) == 1
    assert waiting(client) == {"a": 0, "b": 0}
    ready(client, "a", "b")


def test_an_engine_that_was_away_gets_what_it_missed_before_it_is_asked(client: Client, engines: Engines) -> None:
    a, b = engines
    last(client, FERRY)
    b.stop()
    ready(client, "a")
    assert last(client, LIGHT, Document("ferry", "It leaves at ten.")) == ["stored", "stored"]
    client.delete("light")
    assert last(client, Document("boat", "It floats.")) == ["stored"]
    assert waiting(client) == {"a": 0, "b": 3}, "one for each document: the last that is to become of it"
    held = threading.Event()
    b.before["ListDocuments"] = lambda _: held.wait(20)  # the comparison, after which it is asked
    b.calls.clear()
    b.start()
    wait_for("what it missed", lambda: b.texts() == a.texts())
    for _ in range(5):
        client.retrieve("When?")
    assert b.asked("Retrieve") == 0
    held.set()
    ready(client, "a", "b")
    assert waiting(client) == {"a": 0, "b": 0}
    assert b.texts() == {"ferry": b"It leaves at ten.", "boat": b"It floats."}
    for _ in range(4):
        client.ask("When?")
    assert a.asked("Answer") and b.asked("Answer")


def test_what_engines_miss_outlives_the_router(route: Callable[..., Router], engines: Engines) -> None:
    with Client(route().address) as client:
        ready(client, "a", "b")
        engines[1].stop()
        ready(client, "a")
        last(client, FERRY)
    with Client(route().address) as client:
        ready(client, "a")
        assert waiting(client) == {"a": 0, "b": 1}
        engines[1].start()
        ready(client, "a", "b")
        assert engines[1].texts() == {"ferry": b"It leaves at nine."}


def vanish(engine: Any) -> Callable[[Any], None]:
    """What makes an engine cut off a call, once."""

    def at_once(context: Any) -> None:
        engine.before.pop("Ingest", None)
        engine.during.pop("Ingest", None)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    return at_once


def first_leaves(engines: Engines, then: Callable[[FakeEngine], object]) -> list[FakeEngine]:
    """Have the engine that is given a document first go away in the middle of it; the other is told ``then``.

    Returns:
        that engine, once it is known.
    """
    left: list[FakeEngine] = []

    def leave(engine: FakeEngine, other: FakeEngine, context: Any) -> None:
        for each in engines:
            del each.during["Ingest"]
        then(other)
        left.append(engine)
        engine.serve(False)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    for engine, other in (engines, engines[::-1]):
        engine.during["Ingest"] = partial(leave, engine, other)
    return left


@pytest.mark.parametrize("when", ["before", "during"])
def test_when_one_engine_fails_the_next_one_takes_the_document(client: Client, engines: Engines, when: str) -> None:
    for engine in engines:
        getattr(engine, when)["Ingest"] = vanish(engine)
    engines[1].before.clear()
    engines[1].during.clear()
    documents = [Document(f"d{number}", f"text {number}") for number in range(4)]
    assert last(client, *documents) == ["stored"] * 4
    ready(client, "a", "b")
    assert len(engines[0].documents) == 4
    assert engines[0].texts() == engines[1].texts()


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL"])
def test_when_one_engine_has_no_room_the_next_one_takes_the_document(
    client: Client, engines: Engines, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    failed = []

    def fail_once(engine: FakeEngine, _: Any) -> None:
        engine.fails_with = "" if failed else code
        failed.append(engine.name)

    for engine in engines:
        engine.during["Ingest"] = partial(fail_once, engine)
    assert last(client, FERRY) == ["stored"]
    ready(client, "a", "b")
    assert len(set(failed)) == 2
    assert f"event=behind engine={failed[0]} tenant=default document='ferry' reason={code}" in caplog.text
    assert "nine" not in caplog.text, "the engine's message quotes the document"
    assert engines[0].texts() == engines[1].texts() == {"ferry": b"It leaves at nine."}


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [TierUnavailable("the router's journal: disk I/O error"), DecodeError("parsing")])
def test_a_failure_of_the_routers_own_leaves_no_engine_asked_that_may_lack_a_document(
    client: Client, engines: Engines, monkeypatch: pytest.MonkeyPatch, failing: int, error: Exception
) -> None:
    applied, calls = Journal.applied, []

    def failed(self: Journal, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == failing:
            raise error
        applied(self, *arguments)

    monkeypatch.setattr(Journal, "applied", failed)
    if failing == 1:  # the call with which the lead's outcome is noted
        with pytest.raises(ServiceError):
            last(client, FERRY)
    else:
        assert last(client, FERRY) == ["stored"]
    ready(client, "a", "b")
    assert engines[0].texts() == engines[1].texts() == {"ferry": b"It leaves at nine."}
    assert waiting(client) == {"a": 0, "b": 0}


def test_a_document_that_no_engine_finished_comes_later(client: Client, engines: Engines) -> None:
    for engine in engines:
        engine.during["Ingest"] = vanish(engine)
    with pytest.raises(ServiceError, match="may come to pass later") as raised:
        last(client, FERRY)
    assert raised.value.code == "UNAVAILABLE"
    ready(client, "a", "b")
    assert engines[0].texts() == engines[1].texts() == {"ferry": b"It leaves at nine."}
    assert waiting(client) == {"a": 0, "b": 0}


def test_an_engine_that_refuses_what_another_takes_meanwhile_is_given_it_again(
    client: Client, engines: Engines
) -> None:
    a, b = engines
    compared = a.asked("ListDocuments")

    def vanish_first(context: Any) -> None:
        b.during["Ingest"] = refuse
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def refuse(_: Any) -> None:
        wait_for("a has taken it", lambda: a.asked("ListDocuments") > compared)
        b.fails_with = "RESOURCE_EXHAUSTED"
        b.during["Ingest"] = lambda _: setattr(b, "fails_with", "")

    a.during["Ingest"], b.during["Ingest"] = vanish(a), vanish_first
    with pytest.raises(ServiceError, match="may come to pass later"):
        last(client, FERRY)
    ready(client, "a", "b")
    assert a.texts() == b.texts() == {"ferry": b"It leaves at nine."}


def test_nobody_is_compared_again_for_a_change_that_nobody_takes(client: Client, engines: Engines) -> None:
    first = first_leaves(engines, lambda other: setattr(other, "fails_with", "INVALID_ARGUMENT"))
    assert last(client, FERRY) == ["failed"]
    (left,) = first
    (other,) = (engine for engine in engines if engine is not left)
    ready(client, other.name)
    compared = other.asked("ListDocuments")
    left.fails_with = "INVALID_ARGUMENT"
    left.serve(True)
    ready(client, "a", "b")
    assert waiting(client) == {"a": 0, "b": 0}
    assert other.asked("ListDocuments") == compared


@pytest.mark.parametrize("refusal", ["of the document", "of the call"])
def test_a_document_that_was_not_found_does_not_appear_afterwards(
    client: Client, engines: Engines, refusal: str
) -> None:
    def refuse(engine: FakeEngine) -> None:
        if refusal == "of the document":
            engine.fails_with = "INVALID_ARGUMENT"
        else:
            engine.before["Ingest"] = lambda context: context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    first = first_leaves(engines, refuse)
    if refusal == "of the document":
        told = list(client.ingest([FERRY]))[-1].failed
        assert told.code == "INVALID_ARGUMENT"
        assert "may come to pass later" in told.message
    else:
        with pytest.raises(ServiceError, match="not you; .* may come to pass later") as raised:
            last(client, FERRY)
        assert raised.value.code == "PERMISSION_DENIED"
    (left,) = first
    (other,) = (engine for engine in engines if engine is not left)
    left.documents["ferry"] = ("", b"It leaves at nine.")  # it had come so far
    ready(client, other.name)
    with pytest.raises(ServiceError, match="no such document") as raised:
        client.delete("ferry")
    assert raised.value.code == "NOT_FOUND"
    other.fails_with = ""
    other.before.clear()
    left.serve(True)
    ready(client, "a", "b")
    assert engines[0].texts() == engines[1].texts() == {}
    assert waiting(client) == {"a": 0, "b": 0}


def die(engine: FakeEngine, revived: list[threading.Thread], context: Any) -> None:
    """What makes an engine go away in the middle of a document, and come back soon."""
    engine.serve(False)
    revived.append(threading.Timer(0.3, engine.serve, [True]))
    revived[-1].start()
    context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def test_a_document_that_kills_engines_is_given_up(
    client: Client, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    revived: list[threading.Thread] = []
    for engine in engines:
        engine.during["Ingest"] = partial(die, engine, revived)
    with pytest.raises(ServiceError, match="may come to pass later"):
        last(client, FERRY)
    engines[0].documents["ferry"] = ("", b"It leaves at nine.")  # it died late
    ready(client, "a", "b")
    assert 5 <= len(revived) <= 6, "two engines at first, and three times more; or four, two of them at once"
    assert engines[0].texts() == engines[1].texts() == {}
    assert waiting(client) == {"a": 0, "b": 0}
    assert "event=given_up tenant=default document='ferry' failures=3" in caplog.text
    for thread in revived:
        thread.join()


def test_a_document_that_no_engine_finished_can_be_cancelled(client: Client, engines: Engines) -> None:
    def leave(engine: FakeEngine, context: Any) -> None:
        engine.serve(False)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    for engine in engines:
        engine.during["Ingest"] = partial(leave, engine)
    with pytest.raises(ServiceError, match="may come to pass later"):
        last(client, FERRY)
    wait_for("both gone", lambda: "b: not serving" in _refusal(client) and "a: not serving" in _refusal(client))
    asked = sum(engine.asked("Ingest") for engine in engines)
    with pytest.raises(ServiceError, match="what no engine could finish of 'ferry' is cancelled") as raised:
        client.delete("ferry")
    assert raised.value.code == "UNAVAILABLE"
    with pytest.raises(ServiceError, match="not serving") as raised:
        client.delete("ferry")
    assert "cancelled" not in raised.value.message
    for engine in engines:
        engine.serve(True)
    ready(client, "a", "b")
    assert sum(engine.asked("Ingest") for engine in engines) == asked
    assert engines[0].texts() == engines[1].texts() == {}


def test_a_document_is_finished_though_its_caller_leaves(client: Client, engines: Engines) -> None:
    held = threading.Event()
    for engine in engines:
        engine.during["Ingest"] = lambda _: held.wait(20)
    stages = client.ingest([FERRY])
    next(stages)
    stages.close()  # type: ignore[attr-defined]
    held.set()
    wait_for("the document", lambda: all(engine.texts() for engine in engines))
    ready(client, "a", "b")


def test_an_engine_that_lost_documents_is_not_asked_until_it_has_them_again(client: Client, engines: Engines) -> None:
    last(client, FERRY, LIGHT)
    engines[1].stop()
    engines[1].documents.clear()
    engines[1].start()
    ready(client, "a")
    wait_for("the reason", lambda: "2 are missing" in str(client.stats().engine.details["router"]["b"]["behind"]))
    assert last(client, FERRY, LIGHT) == ["unchanged", "unchanged"]
    ready(client, "a", "b")
    assert engines[1].texts() == engines[0].texts()


def test_engines_that_differ_before_the_router_knows_them_serve_nobody(
    route: Callable[..., Router], engines: Engines
) -> None:
    engines[0].documents["ferry"] = ("", b"It leaves at nine.")
    with Client(route().address) as client:
        wait_for("the engines", lambda: _refusal(client) != "")
        wait_for("the reason", lambda: "hold different documents" in _refusal(client))
        engines[1].documents.update(engines[0].documents)
        ready(client, "a", "b")
        assert client.get("ferry").id == "ferry"


def _refusal(client: Client) -> str:
    with pytest.raises(ServiceError) as raised:
        client.stats()
    assert raised.value.code == "UNAVAILABLE"
    return raised.value.message


def test_without_any_engine_calls_are_refused_at_once(client: Client, engines: Engines) -> None:
    for engine in engines:
        engine.stop()
    wait_for("both gone", lambda: "b: not serving" in _refusal(client) and "a: not serving" in _refusal(client))


def test_a_full_journal_refuses_documents(route: Callable[..., Router], engines: Engines) -> None:
    with Client(route(journal_bytes=4096).address) as client:
        ready(client, "a", "b")
        engines[1].stop()
        ready(client, "a")
        assert last(client, Document("one", "x" * 3000)) == ["stored"]
        with pytest.raises(ServiceError, match="journal is full") as raised:
            last(client, Document("two", "x" * 3000))
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        engines[1].start()
        ready(client, "a", "b")
        assert last(client, Document("two", "x" * 3000)) == ["stored"]


def test_a_busy_engine_is_waited_for(client: Client, engines: Engines) -> None:
    refused = []

    def busy(context: Any) -> None:
        if len(refused) < 2:
            refused.append(1)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "2 requests wait")

    # Of the two, whichever comes second: the first one's refusal is the caller's to hear.
    for engine in engines:
        engine.during["Ingest"] = lambda _, engine=engine: engines[1 - engines.index(engine)].before.setdefault(
            "Ingest", busy
        )
    assert last(client, FERRY) == ["stored"]
    assert len(refused) == 2
    assert engines[0].texts() == engines[1].texts()

"""Answers through a router: who gives them, and what goes through as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blend.config import ResidencySource
from blend.store.events import ResidencyPublisher
from blend.store.key import PLAIN, ObjectKey
from blend_server.client import Client, Document, ServiceError
from blend_server.hosting import SERVICE_NAME
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub
from blend_server.router import EngineAddress
from blend_server.router.server import Router
from tests.server.router.conftest import Engines, ready
from tests.server.router.fakes import FakeEngine, key_of, wait_for

ASK = pb.AnswerRequest(question="When?")


@pytest.fixture
def stub(client: Client) -> Iterator[Any]:
    """The bare protocol to the client's router; there is one document."""
    list(client.ingest([Document("ferry", "It leaves at nine.")]))
    with grpc.insecure_channel(client.address) as channel:
        yield BlendServiceStub(channel)  # type: ignore[no-untyped-call]


def served_by(call: Any) -> str:
    return dict(call.initial_metadata())["blend-engine"]


def test_what_a_caller_sends_and_gets_goes_through(stub: Any, engines: Engines) -> None:
    sent = (("x-request-id", "mine"), ("traceparent", "00-ab-cd-01"), ("data-bin", b"\x00\x01"))
    call = stub.Answer(ASK, metadata=sent)
    assert [event.WhichOneof("event") for event in call] == ["passages", "token", "token", "answer"]
    name = served_by(call)
    (engine,) = (each for each in engines if each.name == name)
    assert dict(sent).items() <= engine.calls[-1][1].items()
    assert dict(call.trailing_metadata()) == {"x-request-id": "mine", "served-by": name}
    _, call = stub.GetDocument.with_call(pb.GetDocumentRequest(id="ferry"), metadata=sent)
    trailing = dict(call.trailing_metadata())
    assert trailing["x-request-id"] == "mine"
    assert trailing["served-by"] == trailing["blend-engine"]


def test_without_an_id_the_router_makes_one(stub: Any, engines: Engines) -> None:
    call = stub.Answer(ASK)
    list(call)
    made = dict(call.trailing_metadata())["x-request-id"]
    assert len(made) == 32
    assert made in [metadata.get("x-request-id") for engine in engines for _, metadata in engine.calls]


def test_an_engines_error_comes_as_it_is(stub: Any, engines: Engines) -> None:
    details = Status(code=8, message="full")
    retry = RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    details.details.add().Pack(retry)

    def refuse(context: Any) -> None:
        context.set_trailing_metadata(
            (("blend-error", "ResourceExhausted"), ("grpc-status-details-bin", details.SerializeToString()))
        )
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    for engine in engines:
        engine.before["Answer"] = refuse
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Answer(ASK))
    error: Any = raised.value
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    trailing = dict(error.trailing_metadata())
    assert trailing["grpc-status-details-bin"] == details.SerializeToString()
    assert trailing["blend-error"] == "ResourceExhausted"
    assert engines[0].asked("Answer") == engines[1].asked("Answer") == 1, "the other one might have had room"


def test_an_answer_that_one_engine_has_not_begun_is_given_by_another(stub: Any, engines: Engines) -> None:
    for engine in engines:
        engine.before["Answer"] = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")
    engines[1].before.clear()
    for _ in range(3):
        call = stub.Answer(ASK)
        assert len(list(call)) == 4
        assert served_by(call) == "b"


def test_the_last_engines_error_is_the_callers_though_none_is_left(stub: Any, client: Client, engines: Engines) -> None:
    def refuse(context: Any) -> None:
        for engine in engines:
            engine.serve(False)
        wait_for("none", lambda: refused(client))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    for engine in engines:
        engine.before["GetDocument"] = engine.before["Answer"] = refuse
    for ask in (lambda: list(stub.Answer(ASK)), lambda: stub.GetDocument(pb.GetDocumentRequest(id="ferry"))):
        with pytest.raises(grpc.RpcError) as raised:
            ask()
        error: Any = raised.value
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        for engine in engines:
            engine.serve(True)
        ready(client, "a", "b")


def refused(client: Client) -> bool:
    try:
        client.stats()
    except ServiceError:
        return True
    return False


def test_other_errors_are_not_tried_elsewhere(stub: Any, engines: Engines) -> None:
    for engine in engines:
        engine.before["Answer"] = lambda context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "k: got 0")
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Answer(ASK))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert engines[0].asked("Answer") + engines[1].asked("Answer") == 1


def test_an_engine_that_goes_away_in_an_answer_makes_it_unavailable(stub: Any, engines: Engines) -> None:
    held = threading.Event()
    for engine in engines:
        engine.during["Answer"] = lambda _: held.wait(20)
    call = stub.Answer(ASK)
    assert next(call).WhichOneof("event") == "passages"
    (engine,) = (each for each in engines if each.name == served_by(call))
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    held.set()
    stopping.join()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    other = stub.Answer(ASK)
    assert len(list(other)) == 4
    assert served_by(other) != engine.name


def test_a_caller_that_leaves_ends_the_answer(stub: Any, engines: Engines) -> None:
    for engine in engines:
        engine.tokens = ["word"] * 100_000
    call = stub.Answer(ASK)
    next(call)
    (engine,) = (each for each in engines if each.name == served_by(call))
    engine.cancelled.clear()
    call.cancel()
    assert engine.cancelled.wait(20)


def test_a_deadline_reaches_the_engine(stub: Any, engines: Engines) -> None:
    left: list[float] = []
    for engine in engines:
        engine.before["Answer"] = lambda context: left.append(context.time_remaining())
    list(stub.Answer(ASK, timeout=100))
    assert 50 < left[0] < 110, "on each way gRPC rounds up what is left"


def test_whoever_reads_slowly_holds_the_engine_back(stub: Any, engines: Engines) -> None:
    for engine in engines:
        engine.tokens = ["word" * 4096] * 4000
    call = stub.Answer(ASK)
    next(call)
    (engine,) = (each for each in engines if each.name == served_by(call))
    before = -1
    while engine.sent != before:  # until it does not get on
        before = engine.sent
        sleep(0.5)
    assert 0 < engine.sent < 2000
    assert len(list(call)) == 4001
    assert engine.sent == 4000


@pytest.fixture
def publishers() -> Iterator[dict[str, ResidencyPublisher]]:
    """What both engines' tiers tell."""
    with ResidencyPublisher("a") as a, ResidencyPublisher("b") as b:
        yield {"a": a, "b": b}


@pytest.fixture
def near(
    route: Callable[..., Router], engines: Engines, publishers: dict[str, ResidencyPublisher]
) -> Iterator[tuple[Any, Router]]:
    """A router that hears what the engines' tiers hold."""

    def address(engine: FakeEngine) -> EngineAddress:
        told = publishers[engine.name]
        return EngineAddress(engine.name, engine.address, ResidencySource(told.address, told.replay_address))

    router = route(engines=tuple(map(address, engines)), lead=2)
    with Client(router.address) as client, grpc.insecure_channel(router.address) as channel:
        ready(client, "a", "b")
        list(client.ingest([Document("ferry", "It leaves at nine."), Document("light", "It is red.")]))
        yield BlendServiceStub(channel), router  # type: ignore[no-untyped-call]


FERRY, LIGHT = (ObjectKey(key_of(text), PLAIN) for text in (b"It leaves at nine.", b"It is red."))


def names(stub: Any, count: int) -> set[str]:
    found = set()
    for _ in range(count):
        call = stub.Answer(ASK)
        list(call)
        found.add(served_by(call))
    return found


def test_the_engine_that_holds_most_of_the_chunks_answers(
    near: tuple[Any, Router], publishers: dict[str, ResidencyPublisher]
) -> None:
    stub, _ = near
    assert names(stub, 4) == {"a", "b"}, "nothing is known: in turn"
    publishers["b"].on_stored(FERRY, "host", 1000)
    publishers["a"].on_stored(LIGHT, "disk", 500)
    publishers["a"].on_stored(FERRY, "mooncake", 1000)  # is as near to the other
    wait_for("both keys", lambda: names(stub, 3) == {"b"})
    publishers["a"].on_stored(FERRY, "host", 1000)
    wait_for("its copy", lambda: names(stub, 3) == {"a"})
    publishers["a"].on_removed(FERRY, "host")
    wait_for("its removal", lambda: names(stub, 3) == {"b"})


def test_a_node_that_is_no_engine_is_told_of_once(
    near: tuple[Any, Router], publishers: dict[str, ResidencyPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    stub, _ = near
    publishers["b"].node = "other"
    for number in range(3):
        publishers["b"].on_stored(ObjectKey(key_of(b"%d" % number), PLAIN), "host", 10)
    publishers["a"].on_stored(FERRY, "host", 1000)
    wait_for("the events", lambda: "event=unknown_node" in caplog.text and names(stub, 3) == {"a"})
    (line,) = (line for line in caplog.text.splitlines() if "event=unknown_node" in line)
    assert "node='other' engines=a,b" in line


def test_a_busy_engine_is_spared_though_it_holds_the_chunks(
    near: tuple[Any, Router], publishers: dict[str, ResidencyPublisher], engines: Engines
) -> None:
    stub, _ = near
    publishers["b"].on_stored(FERRY, "host", 1000)
    wait_for("the event", lambda: names(stub, 3) == {"b"})
    held = threading.Event()
    for engine in engines:
        engine.during["Answer"] = lambda _: held.wait(20)
    calls = [stub.Answer(ASK) for _ in range(6)]
    given = []
    for call in calls:
        next(call)
        given.append(served_by(call))
    held.set()
    assert sorted(given) == ["a"] * 2 + ["b"] * 4 or sorted(given) == ["a"] * 3 + ["b"] * 3
    for call in calls:
        list(call)


def test_its_health_is_that_of_any_engine(client: Client, engines: Engines) -> None:
    with grpc.insecure_channel(client.address) as channel:
        checks = health_pb2_grpc.HealthStub(channel)

        def serving() -> bool:
            return found() == {health_pb2.HealthCheckResponse.SERVING}

        def gone() -> bool:
            return found() == {health_pb2.HealthCheckResponse.NOT_SERVING}

        def found() -> set[int]:
            """The health of the service, and that of the whole."""
            requests = [health_pb2.HealthCheckRequest(service=name) for name in (SERVICE_NAME, "")]
            return {checks.Check(request).status for request in requests}

        assert serving()
        engines[0].stop()
        ready(client, "b")
        assert serving()
        engines[1].stop()
        wait_for("its health", gone)
        engines[1].start()
        wait_for("its health", serving)


def test_figures_are_sums_and_lists(client: Client) -> None:
    stats = client.stats()
    assert (stats.queue.requests, stats.queue.max_queue, stats.engine.requests) == (2, 8, 10)
    assert [tier.name for tier in stats.engine.tiers] == ["a/host", "b/host"]
    assert [stats.engine.details[name]["name"] for name in ("a", "b")] == ["a", "b"]
    assert stats.engine.details["router"]["a"]["serving"]


def test_quality_is_reset_on_every_engine(client: Client, engines: Engines) -> None:
    found = client.reset_quality()
    assert found.was_stopped and found.since.startswith("2026-01-02")
    assert found.reason.count("too far off") == len(engines)
    assert all(engine.asked("ResetQuality") == 1 for engine in engines)


def test_an_engine_that_is_not_reached_is_named_and_those_without_documents_are_reset(
    client: Client, engines: Engines
) -> None:
    a, b = engines
    list(client.ingest([Document("ferry", "It leaves at nine.")]))
    b.stop()
    b.documents.clear()
    b.start()
    a.before["ResetQuality"] = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")
    wait_for("b serves", lambda: client.stats().engine.details["router"]["b"]["serving"])
    wait_for("b lacks it", lambda: client.stats().engine.details["router"]["b"]["behind"])
    with pytest.raises(ServiceError, match="not reset on every engine; a: UNAVAILABLE: shutting down") as raised:
        client.reset_quality()
    assert raised.value.code == "UNAVAILABLE"
    a.before.clear()
    assert client.reset_quality().reason.count("too far off") == 2


def test_an_engine_that_fell_behind_since_the_choice_is_not_asked(stub: Any, client: Client, engines: Engines) -> None:
    def trade(asked: FakeEngine, other: FakeEngine) -> Callable[[Any], None]:
        def leave(context: Any) -> None:
            for engine in engines:
                engine.before.clear()
            other.stop()
            ready(client, asked.name)
            other.documents.clear()
            other.start()
            wait_for("it serves", lambda: client.stats().engine.details["router"][other.name]["behind"])
            context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")

        return leave

    for engine, other in (engines, engines[::-1]):
        engine.before["Answer"] = trade(engine, other)
    with pytest.raises(grpc.RpcError, match="shutting down"):
        list(stub.Answer(ASK))
    assert sum(engine.asked("Answer") for engine in engines) == 1


def test_a_question_longer_than_any_model_takes_goes_no_further(stub: Any, engines: Engines) -> None:
    with pytest.raises(grpc.RpcError, match="at most 1048576 bytes") as raised:
        list(stub.Answer(pb.AnswerRequest(question="x" * ((1 << 20) + 1))))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert not any(engine.asked(method) for engine in engines for method in ("Answer", "Retrieve"))


def test_a_message_that_is_none_is_refused(client: Client) -> None:
    with grpc.insecure_channel(client.address) as channel:
        for method in ("Answer", "DeleteDocument"):
            with pytest.raises(grpc.RpcError) as raised:
                list(channel.unary_stream(f"/{SERVICE_NAME}/{method}")(b"\xff\xff"))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_stopped_router_refuses(route: Callable[..., Router], engines: Engines) -> None:
    router = route()
    with Client(router.address) as client:
        ready(client, "a", "b")
        router.stop()
        with pytest.raises(ServiceError) as raised:
            client.stats()
        assert raised.value.code == "UNAVAILABLE"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("blend-router")]

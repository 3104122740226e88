"""Errors, request ids and log lines at the edge, over real connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
import pytest_asyncio

from blend import errors
from blend_server import interceptors
from blend_server.auth import Caller, OpenGate
from blend_server.interceptors import Edge, InFlight, status_of
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc

SECRET = "the text of a document"


class Raising(blend_pb2_grpc.BlendServiceServicer):
    """Raises what it is told to, after as many events as it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.events = 0

    async def GetDocument(self, request: Any, context: Any) -> pb.DocumentInfo:
        if self.error is not None:
            raise self.error
        return pb.DocumentInfo(id=request.id)

    async def Answer(self, request: Any, context: Any) -> AsyncGenerator[pb.AnswerEvent, None]:
        for n in range(self.events):
            yield pb.AnswerEvent(token=pb.Token(token_id=n))
        if self.error is not None:
            raise self.error

    async def Ingest(self, request_iterator: Any, context: Any) -> AsyncGenerator[pb.IngestProgress, None]:
        async for document in request_iterator:
            yield pb.IngestProgress(document_id=document.id)
        if self.error is not None:
            raise self.error


class Edged:
    """A server of :class:`Raising` behind the interceptor, and a stub for it."""

    def __init__(self) -> None:
        self.service = Raising()
        self.in_flight = InFlight()
        self.server = grpc.aio.server(interceptors=[Edge(self.in_flight)])
        blend_pb2_grpc.add_BlendServiceServicer_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub: Any = blend_pb2_grpc.BlendServiceStub(self.channel)


@pytest_asyncio.fixture
async def edged() -> AsyncGenerator[Edged, None]:
    made = Edged()
    await made.server.start()
    yield made
    await made.channel.close()
    await made.server.stop(None)


async def unary(edged: Edged) -> None:
    await edged.stub.GetDocument(pb.GetDocumentRequest(id="a"))


async def server_stream(edged: Edged) -> None:
    async for _ in edged.stub.Answer(pb.AnswerRequest()):
        pass


async def both_streams(edged: Edged) -> None:
    async for _ in edged.stub.Ingest(iter([pb.Document(id="a")])):
        pass


CALLS: list[Callable[[Edged], Any]] = [unary, server_stream, both_streams]


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("k", 0, "1 or more"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.InvalidPlan("ratio", 2, "0 to 1"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.PromptTooLong(9000, 8192), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFound("document", "a"), grpc.StatusCode.NOT_FOUND),
        (errors.Unauthenticated("no token"), grpc.StatusCode.UNAUTHENTICATED),
        (errors.PermissionDenied("not you"), grpc.StatusCode.PERMISSION_DENIED),
        (errors.ResourceExhausted("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.ModelUnsupported("m", "it has no chat template"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.TierUnavailable("disk"), grpc.StatusCode.UNAVAILABLE),
        (errors.Closed("closed"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_each_branch_of_the_error_tree_has_its_code(
    edged: Edged, call: Callable[[Edged], Any], error: errors.BlendError, code: grpc.StatusCode
) -> None:
    edged.service.error = error
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(edged)
    assert raised.value.code() is code
    assert raised.value.details() == str(error)
    assert dict(raised.value.trailing_metadata())["blend-error"] == type(error).__name__


@pytest.mark.asyncio
async def test_the_field_to_blame_is_named(edged: Edged) -> None:
    edged.service.error = errors.InvalidPlan("plan.ratio", 2, "0 to 1")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await unary(edged)
    assert dict(raised.value.trailing_metadata())["blend-field"] == "plan.ratio"


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS)
async def test_an_unknown_error_is_internal_and_logged_without_its_message(
    edged: Edged, call: Callable[[Edged], Any], caplog: pytest.LogCaptureFixture
) -> None:
    edged.service.error = RuntimeError(SECRET)
    edged.service.error.__cause__ = KeyError(SECRET)
    with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(edged)
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in raised.value.details()
    incident = raised.value.details().rpartition(" ")[2]
    assert f"incident={incident}" in caplog.text
    assert "RuntimeError<-KeyError" in caplog.text
    assert "test_interceptors.py" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.asyncio
async def test_events_before_the_error_arrive(edged: Edged) -> None:
    edged.service.events, edged.service.error = 3, errors.TierUnavailable("disk")
    call = edged.stub.Answer(pb.AnswerRequest())
    assert [(await call.read()).token.token_id for _ in range(3)] == [0, 1, 2]
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()


@pytest.mark.asyncio
@pytest.mark.parametrize(("sent", "kept"), [("job-17", True), ("", False), ("x" * 129, False), ("two words", False)])
async def test_a_request_id_is_kept_or_made(
    edged: Edged, sent: str, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    call = edged.stub.GetDocument(pb.GetDocumentRequest(id="a"), metadata=(("x-request-id", sent),))
    with caplog.at_level(logging.INFO):
        await call
        answered = dict(await call.initial_metadata())["x-request-id"]
    assert dict(await call.trailing_metadata())["x-request-id"] == answered
    assert (answered == sent) is kept
    assert answered
    assert f"rpc=GetDocument request_id={answered} code=OK" in caplog.text


@pytest.mark.asyncio
async def test_an_error_carries_its_request_id(edged: Edged) -> None:
    edged.service.error = errors.NotFound("document", "a")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await edged.stub.GetDocument(pb.GetDocumentRequest(), metadata=(("x-request-id", "job-18"),))
    assert dict(raised.value.trailing_metadata())["x-request-id"] == "job-18"


@pytest.mark.asyncio
async def test_a_long_message_is_cut_to_what_headers_hold(edged: Edged) -> None:
    edged.service.error = errors.NotFound("document", "ü" * 100_000)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await unary(edged)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details().startswith("no such document: 'üü")


@pytest.mark.asyncio
async def test_a_draining_server_refuses_new_calls_and_waits_for_the_others(edged: Edged) -> None:
    with edged.in_flight.call():
        assert not await edged.in_flight.drain(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(edged)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in raised.value.details()
    assert await edged.in_flight.drain(5)


@pytest.mark.asyncio
async def test_calls_are_bounded_without_an_access_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "_MOST_CALLS", 2)
    go_on = asyncio.Event()

    async def behaviour(request: Any, context: Any) -> bytes:
        await go_on.wait()
        return b"done"

    handlers = {"Retrieve": grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=bytes)}
    server = grpc.aio.server(interceptors=[Edge(InFlight())])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("blend.v1.BlendService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        retrieve = channel.unary_unary("/blend.v1.BlendService/Retrieve")
        calls = [asyncio.ensure_future(retrieve(b"")) for _ in range(3)]
        (refused,), _ = await asyncio.wait(calls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        error = refused.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert interceptors.DETAILS_KEY in dict(error.trailing_metadata() or ())
        go_on.set()
        calls.remove(refused)
        assert await asyncio.gather(*calls, retrieve(b"")) == [b"done"] * 3
    await server.stop(None)


class Closed(OpenGate):
    """Lets nobody in."""

    async def identify(self, context: Any) -> Caller:
        raise errors.Unauthenticated("no token")


@pytest.mark.asyncio
async def test_no_message_is_read_of_whoever_is_not_let_in() -> None:
    read: list[bytes] = []

    def reading(data: bytes) -> bytes:
        read.append(data)
        return data

    async def behaviour(request: Any, context: Any) -> bytes:
        return b""

    handlers = {"GetDocument": grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=reading)}
    seen = []
    for gate in (Closed(), OpenGate()):
        server = grpc.aio.server(interceptors=[Edge(InFlight(), gate)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("blend.v1.BlendService", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with suppress(grpc.aio.AioRpcError):
                await channel.unary_unary("/blend.v1.BlendService/GetDocument")(b"text")
        seen.append(list(read))
        await server.stop(None)
    assert seen == [[], [b"text"]]


def test_a_foreign_value_error_is_no_invalid_argument() -> None:
    assert status_of(ValueError("math domain error")).code is grpc.StatusCode.INTERNAL

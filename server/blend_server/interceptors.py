"""Around every call of the service: request ids, who is calling, logs, errors as gRPC status codes, shutdown."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus

from blend import errors
from blend_server import audit, auth
from blend_server.auth import Caller, Gate, OpenGate
from blend_server.operations.context import request_id
from blend_server.operations.logs import stack_of, types_of
from blend_server.operations.observing import Observer
from blend_server.places import Places

logger = logging.getLogger("blend_server")

REQUEST_ID_KEY = "x-request-id"
ERROR_KEY = "blend-error"
FIELD_KEY = "blend-field"
DETAILS_KEY = "grpc-status-details-bin"
"""A ``google.rpc.Status`` with more of an error, such as ``RetryInfo``."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_METHODS = "/blend.v1.BlendService/"
_MAX_MESSAGE_BYTES = 1500
_MOST_CALLS = 1024

_Read: TypeAlias = Callable[[bytes], Any]
M = TypeVar("M")

_CODES: tuple[tuple[type[errors.BlendError], grpc.StatusCode], ...] = (
    (errors.InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.ModelError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StoreError, grpc.StatusCode.UNAVAILABLE),
    (errors.Closed, grpc.StatusCode.UNAVAILABLE),
)


class Status(NamedTuple):
    """What a client learns of an error: a status code, a message, and trailing metadata."""

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str | bytes], ...]


def status_of(error: BaseException) -> Status:
    """The status for ``error``. One that blend did not raise on purpose is logged under an incident id.

    The log gets the types and the stack of such an error, never its message: that may quote a document.
    """
    for kind, code in _CODES:
        if isinstance(error, kind):
            message = _short(str(error))
            metadata: list[tuple[str, str | bytes]] = [(ERROR_KEY, type(error).__name__)]
            if isinstance(error, errors.InvalidInput):
                metadata.append((FIELD_KEY, error.field))
            if isinstance(error, errors.ResourceExhausted) and error.retry_seconds is not None:
                metadata.append((DETAILS_KEY, _retry_details(code, message, error.retry_seconds)))
            return Status(code, message, tuple(metadata))
    incident = uuid.uuid4().hex[:12]
    logger.error(
        "incident=%s request_id=%s error=%s stack=%s", incident, request_id.get(), types_of(error), stack_of(error)
    )
    return Status(grpc.StatusCode.INTERNAL, f"internal error; incident {incident}", ((ERROR_KEY, "Internal"),))


class InFlight:
    """Counts the calls that run, and turns new ones away once it drains. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._calls = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one call.

        Raises:
            Closed: the server drains.
        """
        if self._draining:
            raise errors.Closed("the server is shutting down")
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Turn new calls away and wait for the running ones; returns whether all of them ended in time."""
        self._draining = True
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True


class CallPlaces:
    """A place for each call that is under way, of all tenants together and by each one's quota.

    Args:
        gate: knows the quotas, and whether there are several tenants to share the places.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._places = Places(_MOST_CALLS, "too many calls are under way", shared=gate.many)

    def hold(self, tenant: str) -> AbstractContextManager[None]:
        """Hold a place for one of a tenant's calls; entering it raises ``ResourceExhausted`` where there is none."""
        return self._places.hold(tenant, self._gate.quotas(tenant).requests)


class Edge(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every rpc of ``blend.v1.BlendService``, unary or streaming; other services pass through.

    A message is read once its caller is known and let in; until then it is bytes.

    Args:
        in_flight: counts the calls.
        gate: tells who is calling.
        observer: sees the calls.
    """

    def __init__(self, in_flight: InFlight, gate: Gate | None = None, observer: Observer | None = None) -> None:
        self._in_flight = in_flight
        self._observer = observer or Observer()
        self._gate = gate or OpenGate()
        self._places = CallPlaces(self._gate)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the rpc's handler, wrapped."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or not method.startswith(_METHODS):
            return handler
        shape = {True: "stream", False: "unary"}
        kind = f"{shape[handler.request_streaming]}_{shape[handler.response_streaming]}"
        wrap = self._stream if handler.response_streaming else self._unary
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            wrap(method.removeprefix(_METHODS), getattr(handler, kind), handler.request_deserializer),
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, name: str, behaviour: Callable[..., Awaitable[Any]], read: _Read) -> Callable[..., Any]:
        async def call(request: bytes, context: Any) -> Any:
            async with self._guard(name, context):
                return await behaviour(read_message(read, request), context)

        return call

    def _stream(
        self, name: str, behaviour: Callable[..., AsyncGenerator[Any, None]], read: _Read
    ) -> Callable[..., Any]:
        async def call(request: bytes | AsyncIterable[bytes], context: Any) -> AsyncGenerator[Any, None]:
            # Closed here and now, not when it is collected: a call that ends early must let go of the engine.
            async with self._guard(name, context) as who:
                sent = read_message(read, request) if isinstance(request, bytes) else self._messages(read, request, who)
                async with aclosing(behaviour(sent, context)) as responses:
                    async for response in responses:
                        yield response

        return call

    async def _messages(self, read: _Read, requests: AsyncIterable[bytes], who: Caller) -> AsyncGenerator[Any, None]:
        """The messages of a call that may stay open for long: each is taken only if the caller is still let in."""
        async for request in requests:
            await self._gate.recheck(who)
            yield read_message(read, request)

    @asynccontextmanager
    async def _guard(self, name: str, context: Any) -> AsyncGenerator[Caller, None]:
        call_id = call_id_of(context.invocation_metadata() or ())
        request_id.set(call_id)
        observed = self._observer.call(name, call_id, context.invocation_metadata() or ())
        entry = audit.Entry(name, call_id, context.peer())
        audit.current.set(entry)
        context.set_trailing_metadata(((REQUEST_ID_KEY, call_id),))
        start, code = perf_counter(), grpc.StatusCode.OK.name
        try:
            await context.send_initial_metadata(((REQUEST_ID_KEY, call_id),))
            with self._in_flight.call():
                who = await self._gate.identify(context)
                auth.caller.set(who)
                observed.identified(who.tenant)
                entry.tenant, entry.caller = who.tenant, who.name
                who.require(name)
                with self._places.hold(who.tenant):
                    yield who
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        except Exception as error:  # noqa: BLE001 - the edge: what it is not, becomes INTERNAL
            status = status_of(error)
            code = status.code.name
            await context.abort(status.code, status.message, ((REQUEST_ID_KEY, call_id), *status.metadata))
        finally:
            elapsed = (perf_counter() - start) * 1e3
            logger.info("rpc=%s request_id=%s code=%s ms=%.1f", name, call_id, code, elapsed)
            observed.ended(code)
            entry.ended(code)


def read_message(read: Callable[[bytes], M], data: bytes) -> M:
    """The message that ``read`` makes of bytes; gRPC itself would make UNKNOWN of those that are none.

    Raises:
        InvalidInput: they are none.
    """
    try:
        return read(data)
    except DecodeError as error:
        allowed = "a message of blend/v1/blend.proto, its texts in UTF-8"
        raise errors.InvalidInput("message", "other bytes", allowed) from error


def _retry_details(code: grpc.StatusCode, message: str, seconds: float) -> bytes:
    """An error's ``google.rpc.Status`` that says when to try again."""
    retry = RetryInfo()
    retry.retry_delay.FromMilliseconds(round(seconds * 1e3))
    status = RpcStatus(code=code.value[0], message=message)
    status.details.add().Pack(retry)
    data: bytes = status.SerializeToString()
    return data


def call_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The id that the client sent with a call, where it is usable, else a new one."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex


def _short(message: str) -> str:
    """A message that fits into HTTP/2 headers, where each byte may take three."""
    data = message.encode("utf-8", "replace")
    return message if len(data) <= _MAX_MESSAGE_BYTES else data[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + "…"

"""One engine as the router sees it: its connection, its health, how busy it is, and whose documents it has right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blend.errors import InvalidConfig, InvalidInput
from blend_server.client.credentials import Tls, channel_credentials
from blend_server.hosting import SERVICE_NAME
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.router.config import EngineAddress

logger = logging.getLogger("blend_server.router")

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_WATCH_AGAIN_SECONDS = 0.5


class Link:
    """A connection to one engine. All methods belong to the event loop's thread.

    Messages are bytes on the way through: what the router does not know of a newer protocol, it does not lose.

    Attributes:
        serving: whether the engine's health says that it serves.
        era: rises whenever that changes; what was found out in an earlier era may not be so any more.
        in_flight: answers that it is giving.
        current: the owners whose documents it is known to hold exactly as the journal says.
        behind: by owner, why it does not.
    """

    def __init__(self, engine: EngineAddress, tls: Tls | None, max_message_bytes: int) -> None:
        self.name = engine.name
        self.address = engine.address
        self.serving = False
        self.era = 0
        self.in_flight = 0
        self.last_answer = 0
        self.current: set[str] = set()
        self.behind: dict[str, str] = {}
        options = [
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 60_000),  # find out that an engine hangs while a call waits for it
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 200),  # an engine that starts again is wanted at once
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if tls is None:
            options.append(("grpc.enable_http_proxy", 0))  # it would read the tokens
            self._channel = grpc.aio.insecure_channel(engine.address, options=options)
        else:
            try:
                credentials = channel_credentials(tls)
            except InvalidInput as error:
                raise InvalidConfig(error.field, error.value, error.allowed) from error
            self._channel = grpc.aio.secure_channel(engine.address, credentials, options=options)

    async def watch(self, changed: Callable[[Link], None]) -> None:
        """Follow the engine's health until cancelled; ``changed`` is called after each change of ``serving``."""
        checks = health_pb2_grpc.HealthStub(self._channel)
        while True:
            try:
                async for reply in checks.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME)):
                    self._heard(reply.status == health_pb2.HealthCheckResponse.SERVING, changed)
            except grpc.aio.AioRpcError as error:
                logger.debug("event=unwatched engine=%s code=%s", self.name, error.code().name)
            self._heard(False, changed)
            await asyncio.sleep(_WATCH_AGAIN_SECONDS)

    def _heard(self, serving: bool, changed: Callable[[Link], None]) -> None:
        if serving == self.serving:
            return
        self.serving = serving
        self.era += 1
        self.current.clear()
        self.behind.clear()
        logger.info("event=health engine=%s serving=%s", self.name, str(serving).lower())
        changed(self)

    def holds(self, owner: str) -> bool:
        """Return whether it may be asked about an owner's documents."""
        return self.serving and owner in self.current

    def unary(self, method: str, request: bytes, metadata: Metadata, timeout: float | None) -> Any:
        """Begin a call with one reply; awaiting what is returned gives its bytes."""
        return self._channel.unary_unary(_path(method))(request, metadata=metadata, timeout=timeout)

    def streaming(self, method: str, request: bytes, metadata: Metadata, timeout: float | None) -> Any:
        """Begin a call with many replies; ``read()`` gives their bytes one by one."""
        return self._channel.unary_stream(_path(method))(request, metadata=metadata, timeout=timeout)

    async def ingest(self, document: bytes, metadata: Metadata) -> AsyncGenerator[pb.IngestProgress, None]:
        """Have the engine take one document; yields its progress."""
        # One message and the end of the stream, as a call with one request sends them: where the engine ends a call
        # whose messages come one by one, gRPC may lose its status.
        call = self.streaming("Ingest", document, metadata, None)
        try:
            async for data in call:
                yield pb.IngestProgress.FromString(data)
        finally:
            call.cancel()

    @contextmanager
    def answering(self, turn: int) -> Iterator[None]:
        """Count an answer, the router's ``turn``-th, while it is given."""
        self.in_flight += 1
        self.last_answer = turn
        try:
            yield
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()


def _path(method: str) -> str:
    return f"/{SERVICE_NAME}/{method}"

"""A gRPC server on an event loop in a thread of its own: what the service and the router have in common."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import grpc

from blend.errors import Closed, InvalidConfig
from blend_server.proto.blend.v1 import blend_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["BlendService"].full_name

Started: TypeAlias = Callable[[int], None]
"""To be called once, with the bound port, when calls are served."""

Serve: TypeAlias = Callable[[Started], Coroutine[Any, Any, None]]
"""Serves until it is told to stop; belongs to the event loop's thread."""

GRACE_SECONDS = 1.0
"""For what is on its way to callers when the last call has ended."""

H = TypeVar("H", bound="Hosted")


class Hosted(ABC):
    """A server that is started and stopped from any thread. Also a context manager, which starts and stops it.

    Args:
        name: of its thread, and of itself in errors.
        address: ``host:port`` to listen on; port 0 takes any that is free.

    Attributes:
        failed: set when what it cannot do without has failed. Health says so by then, and all that is left is to stop.
    """

    def __init__(self, name: str, address: str) -> None:
        self.failed = threading.Event()
        self._name = name
        self._host = address.rpartition(":")[0]
        self._port = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._resources = ExitStack()

    @property
    def address(self) -> str:
        """``host:port`` as bound; with port 0 in the settings only known after :meth:`start`."""
        return f"{self._host}:{self._port}"

    def start(self) -> int:
        """Serve; returns the bound port once calls are served.

        Raises:
            Closed: it was started before.
        """
        if self._thread is not None:
            raise Closed(f"{self._name} starts once")
        with ExitStack() as resources:
            serve = self._open(resources)
            started: Future[int] = Future()
            self._thread = threading.Thread(target=self._run, args=(serve, started), name=self._name)
            self._thread.start()
            self._port = started.result()
            self._resources = resources.pop_all()
        return self._port

    def stop(self) -> None:
        """Stop serving: health says so, running calls get ``drain_seconds``, then everything is closed."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop = None
        self._resources.close()

    def __enter__(self: H) -> H:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def _open(self, resources: ExitStack) -> Serve:
        """Open all that is needed, in the caller's thread.

        Args:
            resources: closes what it is given once serving has ended, or where starting fails.
        """

    def _run(self, serve: Serve, started: Future[int]) -> None:
        try:
            asyncio.run(self._host_on_loop(serve, started))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _host_on_loop(self, serve: Serve, started: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        await serve(started.set_result)


def new_server(max_message_bytes: int, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A gRPC server with limits against callers that are gone, silent or too many."""
    return grpc.aio.server(
        interceptors=list(interceptors),
        options=[
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a way to share load
            ("grpc.keepalive_time_ms", 60_000),  # find out about clients that are gone: they hold a place in the queue
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
            ("grpc.max_concurrent_streams", 1024),  # of one connection; more wait at the client
            ("grpc.server_handshake_timeout_ms", 10_000),  # whoever connects and says nothing that makes sense
        ],
    )


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Bind the server to ``host:port``; returns the port.

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    allowed = "an address of this machine with a free port (port 0 takes any)"
    try:
        if credentials is None:
            port = int(server.add_insecure_port(address))
        else:
            port = int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise InvalidConfig("address", address, allowed) from error
    if port == 0:
        raise InvalidConfig("address", address, allowed)
    return port

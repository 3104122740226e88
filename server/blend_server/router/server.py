"""A router from its settings, started and stopped in the right order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blend.errors import Closed, InvalidConfig
from blend_server import auth, lock, tls
from blend_server.auth import DEFAULT_TENANT, Gate
from blend_server.interceptors import InFlight
from blend_server.operations.logs import stack_of, types_of
from blend_server.router.calls import Edge
from blend_server.router.choice import Chooser
from blend_server.router.config import RouterConfig
from blend_server.router.documents import Documents
from blend_server.router.journal import Journal
from blend_server.router.link import SERVICE_NAME, Link
from blend_server.router.service import RouterService

logger = logging.getLogger("blend_server.router")

_GRACE_SECONDS = 1.0  # for what is on its way to callers when the last call has ended


class Router:
    """The router on an event loop in a thread of its own. Also a context manager, which starts and stops it.

    Args:
        config: all settings.

    Attributes:
        failed: set when a task that it cannot do without has ended. Health says so by then, and all that is left is to
            stop.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._resources = ExitStack()
        self._port = 0
        self.failed = threading.Event()

    @property
    def address(self) -> str:
        """``host:port`` as bound; with port 0 in the settings only known after :meth:`start`."""
        return f"{self.config.address.rpartition(':')[0]}:{self._port}"

    def start(self) -> int:
        """Open the journal, listen, and watch the engines; returns the bound port.

        Its health says that it serves as soon as one engine does.

        Raises:
            InvalidConfig: the address cannot be bound, or a file or the data directory cannot be used.
            TierUnavailable: an address of residency events cannot be listened to.
            Closed: it was started before.
        """
        if self._thread is not None:
            raise Closed("a router starts once")
        config = self.config
        with ExitStack() as resources:
            gate = auth.gate(config.security.access_file)
            credentials = tls.server_credentials(found) if (found := config.security.tls) is not None else None
            resources.enter_context(lock.held(config.path))
            names = [engine.name for engine in config.engines]
            journal = Journal(config.path / "journal.sqlite", names, config.journal_bytes)
            chooser = resources.enter_context(Chooser(config))
            started: Future[int] = Future()
            self._thread = threading.Thread(
                target=self._run, args=(journal, chooser, gate, credentials, started), name="blend-router"
            )
            self._thread.start()
            self._port = started.result()
            self._resources = resources.pop_all()
        logger.info("event=started address=%s engines=%s", self.address, ",".join(names))
        return self._port

    def stop(self) -> None:
        """Stop serving: health says so, running calls get ``drain_seconds``, then everything is closed."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop = None
        self._resources.close()

    def __enter__(self) -> Router:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(
        self,
        journal: Journal,
        chooser: Chooser,
        gate: Gate,
        credentials: grpc.ServerCredentials | None,
        started: Future[int],
    ) -> None:
        try:
            asyncio.run(self._serve(journal, chooser, gate, credentials, started))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(
        self,
        journal: Journal,
        chooser: Chooser,
        gate: Gate,
        credentials: grpc.ServerCredentials | None,
        started: Future[int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        config, in_flight, checks = self.config, InFlight(), health.aio.HealthServicer()
        async with AsyncExitStack() as open_now:
            open_now.push_async_callback(gate.close)
            links = [Link(engine, config.tls, config.max_message_bytes) for engine in config.engines]
            for link in links:
                open_now.push_async_callback(link.close)
            documents = Documents(links, journal, () if gate.many else (DEFAULT_TENANT,))
            open_now.push_async_callback(documents.close)
            server = _server(config.max_message_bytes)
            server.add_generic_rpc_handlers((RouterService(documents, chooser, Edge(gate, in_flight)).handler(),))
            health_pb2_grpc.add_HealthServicer_to_server(checks, server)
            reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
            port = _bind(server, config.address, credentials)
            await checks.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
            changed = asyncio.Event()
            work: dict[str, Coroutine[Any, Any, None]] = {
                f"watch-{link.name}": link.watch(lambda _: changed.set()) for link in links
            }
            work |= {"tend": documents.tend(), "tell": _tell(links, checks, changed)}
            background = [asyncio.create_task(each, name=name) for name, each in work.items()]
            open_now.push_async_callback(_end, background)
            open_now.push_async_callback(server.stop, _GRACE_SECONDS)
            await server.start()
            started.set_result(port)
            await self._told_to_stop(background, checks)
            await checks.enter_graceful_shutdown()
            drained = await in_flight.drain(config.drain_seconds)
        logger.info("event=stopped drained=%s", str(drained).lower())

    async def _told_to_stop(self, background: list[asyncio.Task[None]], checks: health.aio.HealthServicer) -> None:
        """Return once the router is to stop. Where one of its own tasks ends before, health says so."""
        stop = asyncio.create_task(self._stop.wait())
        ended, _ = await asyncio.wait([stop, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in ended - {stop}:
            error = task.exception()
            why = "none" if error is None else f"{types_of(error)} stack={stack_of(error)}"
            logger.error("event=failed task=%s error=%s", task.get_name(), why)
            self.failed.set()
        if self.failed.is_set():
            await checks.enter_graceful_shutdown()
        await stop


async def _tell(links: list[Link], checks: health.aio.HealthServicer, changed: asyncio.Event) -> None:
    """Keep the router's health: it serves while an engine does."""
    statuses = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}
    while True:
        await changed.wait()
        changed.clear()
        await checks.set(SERVICE_NAME, statuses[any(link.serving for link in links)])


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _server(max_message_bytes: int) -> grpc.aio.Server:
    return grpc.aio.server(
        options=[
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),  # a second router on the same port is a mistake
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
            ("grpc.max_concurrent_streams", 1024),
            ("grpc.server_handshake_timeout_ms", 10_000),
        ],
    )


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
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

"""A server from its settings: engine, library and gRPC, started and stopped in the right order."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blend.config import ServerConfig
from blend.errors import Closed, InvalidConfig
from blend.rag.embedding import Embedder
from blend_server import audit, auth, lock, tls
from blend_server.auth import Gate
from blend_server.engines import open_engine
from blend_server.interceptors import Edge, InFlight
from blend_server.operations import page
from blend_server.operations.observing import Observer, open_observer
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc
from blend_server.service import BlendService

logger = logging.getLogger("blend_server")

_GRACE_SECONDS = 1.0  # for what is on its way to clients when the last call has ended
_ALIVE_SECONDS = 1.0
"""How often the engine is asked whether it is alive."""

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["BlendService"].full_name


class BlendServer:
    """The service on an event loop in a thread of its own. Also a context manager, which starts and stops it.

    Args:
        config: all settings; documents, indexes and stored KV live below ``config.path`` unless the engine's store
            names a directory of its own.

    Attributes:
        failed: set when the engine has failed. Health says so by then, and all that is left is to stop.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._resources = ExitStack()
        self._port = 0
        self._metrics_port = 0
        self.failed = threading.Event()

    @property
    def address(self) -> str:
        """``host:port`` as bound; with port 0 in the settings only known after :meth:`start`."""
        host = self.config.address.rpartition(":")[0]
        return f"{host}:{self._port}"

    @property
    def metrics_address(self) -> str | None:
        """``host:port`` of the metrics as bound, once :meth:`start` has returned; ``None`` where none are served."""
        address = self.config.operations.metrics_address
        return None if address is None else f"{address.rpartition(':')[0]}:{self._metrics_port}"

    def start(self) -> int:
        """Load the model, open the documents, listen; returns the bound port once requests are served.

        Raises:
            InvalidConfig: an address cannot be bound, another server has the data directory, the files of
                ``config.security`` cannot be used, or traces are asked for without OpenTelemetry.
            ModelError: the model cannot be used.
            StoreError: the data directory cannot be used.
            Closed: it was started before.
        """
        if self._thread is not None:
            raise Closed("a server starts once")
        with ExitStack() as resources:
            gate = auth.gate(self.config.security.access_file)
            observer = open_observer(self.config.operations)
            resources.callback(observer.close)
            credentials = tls.server_credentials(found) if (found := self.config.security.tls) is not None else None
            resources.enter_context(lock.held(self.config.path))
            resources.enter_context(audit.written(self.config.security.audit_file))
            engine = open_engine(self.config)
            resources.callback(engine.close)
            embedder = Embedder(self.config.rag.embedding_model)
            embedder.load()  # or the first question would pay for it
            service = BlendService(engine, embedder, self.config, gate)
            observer.watch(service.sources(lambda: not self._stop.is_set(), gate.tenants))
            if (address := self.config.operations.metrics_address) is not None:
                self._metrics_port = resources.enter_context(page.served(address, observer.registry))
            started: Future[int] = Future()
            self._thread = threading.Thread(
                target=self._run, args=(service, gate, observer, credentials, started), name="blend-server"
            )
            self._thread.start()
            self._port = started.result()
            self._resources = resources.pop_all()
        logger.info("event=started address=%s model=%s", self.address, self.config.engine.model)
        return self._port

    def stop(self) -> None:
        """Stop serving: health says so, running requests get ``drain_seconds``, then everything is closed."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop = None
        self._resources.close()

    def __enter__(self) -> BlendServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(
        self,
        service: BlendService,
        gate: Gate,
        observer: Observer,
        credentials: grpc.ServerCredentials | None,
        started: Future[int],
    ) -> None:
        try:
            asyncio.run(self._serve(service, gate, observer, credentials, started))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(
        self,
        service: BlendService,
        gate: Gate,
        observer: Observer,
        credentials: grpc.ServerCredentials | None,
        started: Future[int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        in_flight, checks = InFlight(), health.aio.HealthServicer()
        server = _server(self.config, Edge(in_flight, gate, observer))
        blend_pb2_grpc.add_BlendServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = _bind(server, self.config.address, credentials)
        try:
            await service.start()
            await server.start()
            await checks.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
            started.set_result(port)
            await self._told_to_stop(service, checks)
            # Watchers of the health service stay connected as long as they like, so the drain counts our own calls.
            await checks.enter_graceful_shutdown()
            drained = await in_flight.drain(self.config.drain_seconds)
        finally:
            await server.stop(_GRACE_SECONDS)
            await service.close()
            await gate.close()
        logger.info("event=stopped drained=%s", str(drained).lower())

    async def _told_to_stop(self, service: BlendService, checks: health.aio.HealthServicer) -> None:
        """Return once the server is to stop. Where its engine fails before, health says so."""
        while not self._stop.is_set():
            if not service.alive and not self.failed.is_set():
                logger.error("event=failed reason=engine")
                await checks.enter_graceful_shutdown()
                self.failed.set()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _ALIVE_SECONDS)


def _server(config: ServerConfig, edge: Edge) -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=[edge],
        options=[
            ("grpc.max_send_message_length", config.max_message_bytes),
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a way to share load
            ("grpc.keepalive_time_ms", 60_000),  # find out about clients that are gone: they hold a place in the queue
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
            ("grpc.max_concurrent_streams", 1024),  # of one connection; more wait at the client
            ("grpc.server_handshake_timeout_ms", 10_000),  # whoever connects and says nothing that makes sense
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

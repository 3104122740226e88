"""A server from its settings: engine, library and gRPC, started and stopped in the right order."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blend.config import ServerConfig
from blend.rag.embedding import Embedder
from blend_server import audit, auth, lock, tls
from blend_server.auth import Gate
from blend_server.engines import open_engine
from blend_server.hosting import GRACE_SECONDS, SERVICE_NAME, Hosted, Serve, Started, bind, new_server
from blend_server.interceptors import Edge, InFlight
from blend_server.operations import page
from blend_server.operations.observing import Observer, open_observer
from blend_server.proto.blend.v1 import blend_pb2_grpc
from blend_server.service import BlendService

logger = logging.getLogger("blend_server")

_ALIVE_SECONDS = 1.0
"""How often the engine is asked whether it is alive."""


class BlendServer(Hosted):
    """The service on an event loop in a thread of its own. Also a context manager, which starts and stops it.

    Args:
        config: all settings; documents, indexes and stored KV live below ``config.path`` unless the engine's store
            names a directory of its own.

    Attributes:
        failed: set when the engine has failed. Health says so by then, and all that is left is to stop.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        super().__init__("blend-server", self.config.address)
        self._metrics_port = 0
        self._serving = False

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
        port = super().start()
        logger.info("event=started address=%s model=%s", self.address, self.config.engine.model)
        return port

    def _open(self, resources: ExitStack) -> Serve:
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
        observer.watch(service.sources(lambda: self._serving, gate.tenants))
        if (address := self.config.operations.metrics_address) is not None:
            self._metrics_port = resources.enter_context(page.served(address, observer.registry))
        return partial(self._serve, service, gate, observer, credentials)

    async def _serve(
        self,
        service: BlendService,
        gate: Gate,
        observer: Observer,
        credentials: grpc.ServerCredentials | None,
        started: Started,
    ) -> None:
        in_flight, checks = InFlight(), health.aio.HealthServicer()
        server = new_server(self.config.max_message_bytes, [Edge(in_flight, gate, observer)])
        blend_pb2_grpc.add_BlendServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = bind(server, self.config.address, credentials)
        try:
            await service.start()
            await server.start()
            await checks.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
            self._serving = True
            started(port)
            await self._told_to_stop(service, checks)
            self._serving = False
            # Watchers of the health service stay connected as long as they like, so the drain counts our own calls.
            await checks.enter_graceful_shutdown()
            drained = await in_flight.drain(self.config.drain_seconds)
        finally:
            await server.stop(GRACE_SECONDS)
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

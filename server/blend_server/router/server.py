"""A router from its settings, started and stopped in the right order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blend_server import auth, lock, tls
from blend_server.auth import DEFAULT_TENANT, Gate
from blend_server.hosting import GRACE_SECONDS, SERVICE_NAME, Hosted, Serve, Started, bind, new_server
from blend_server.interceptors import InFlight
from blend_server.operations.logs import stack_of, types_of
from blend_server.router.calls import Guard
from blend_server.router.choice import Chooser
from blend_server.router.config import RouterConfig
from blend_server.router.documents import Documents
from blend_server.router.journal import Journal
from blend_server.router.link import Link
from blend_server.router.service import RouterService

logger = logging.getLogger("blend_server.router")


class Router(Hosted):
    """The router on an event loop in a thread of its own. Also a context manager, which starts and stops it.

    Args:
        config: all settings.

    Attributes:
        failed: set when a task that it cannot do without has ended. Health says so by then, and all that is left is to
            stop.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        super().__init__("blend-router", config.address)

    def start(self) -> int:
        """Open the journal, listen, and watch the engines; returns the bound port.

        Its health says that it serves as soon as one engine does.

        Raises:
            InvalidConfig: the address cannot be bound, or a file or the data directory cannot be used.
            TierUnavailable: an address of residency events cannot be listened to.
            Closed: it was started before.
        """
        port = super().start()
        names = ",".join(engine.name for engine in self.config.engines)
        logger.info("event=started address=%s engines=%s", self.address, names)
        return port

    def _open(self, resources: ExitStack) -> Serve:
        config = self.config
        gate = auth.gate(config.security.access_file)
        credentials = tls.server_credentials(found) if (found := config.security.tls) is not None else None
        resources.enter_context(lock.held(config.path))
        journal = Journal(
            config.path / "journal.sqlite", [engine.name for engine in config.engines], config.journal_bytes
        )
        chooser = resources.enter_context(Chooser(config))
        return partial(self._serve, journal, chooser, gate, credentials)

    async def _serve(
        self,
        journal: Journal,
        chooser: Chooser,
        gate: Gate,
        credentials: grpc.ServerCredentials | None,
        started: Started,
    ) -> None:
        config, in_flight, checks = self.config, InFlight(), health.aio.HealthServicer()
        async with AsyncExitStack() as open_now:
            open_now.push_async_callback(gate.close)
            links = [Link(engine, config.tls, config.max_message_bytes) for engine in config.engines]
            for link in links:
                open_now.push_async_callback(link.close)
            documents = Documents(links, journal, gate, () if gate.many else (DEFAULT_TENANT,))
            open_now.push_async_callback(documents.close)
            server = new_server(config.max_message_bytes)
            server.add_generic_rpc_handlers((RouterService(documents, chooser, Guard(gate, in_flight)).handler(),))
            health_pb2_grpc.add_HealthServicer_to_server(checks, server)
            reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
            port = bind(server, config.address, credentials)
            await _set_health(checks, serving=False)
            changed = asyncio.Event()
            work: dict[str, Coroutine[Any, Any, None]] = {
                f"watch-{link.name}": link.watch(lambda _: changed.set()) for link in links
            }
            work |= {"tend": documents.tend(), "tell": _tell(links, checks, changed)}
            background = [asyncio.create_task(each, name=name) for name, each in work.items()]
            open_now.push_async_callback(_end, background)
            open_now.push_async_callback(server.stop, GRACE_SECONDS)
            await server.start()
            started(port)
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
    while True:
        await changed.wait()
        changed.clear()
        await _set_health(checks, serving=any(link.serving for link in links))


async def _set_health(checks: health.aio.HealthServicer, *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in (SERVICE_NAME, health.OVERALL_HEALTH):
        await checks.set(name, status)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

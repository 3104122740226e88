"""The page of metrics: plain HTTP on a port of its own, for Prometheus to read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

from blend.errors import InvalidConfig

_SECONDS = 5.0
"""Longest wait for a client that says nothing, or takes nothing."""
_MOST_AT_ONCE = 8


@contextmanager
def served(address: str, registry: CollectorRegistry) -> Iterator[int]:
    """Serve metrics at ``host:port`` inside the ``with`` block; yields the port.

    Whoever reaches the address can read them, on whatever path. More than a few readers at once are turned away.

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        server = _Server(host.removeprefix("[").removesuffix("]"), int(port), registry)
    except OSError as error:
        allowed = f"an address of this machine with a free port ({error.strerror})"
        raise InvalidConfig("operations.metrics_address", address, allowed) from error
    thread = threading.Thread(target=server.serve_forever, name="blend-metrics")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Answers each reader in a thread of its own, and few at once."""

    daemon_threads = True  # a reader that stalls holds nobody up at the end
    block_on_close = False

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        handler = MetricsHandler.factory(registry)
        handler.timeout = _SECONDS  # type: ignore[attr-defined]
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a reader, or turn it away."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a reader, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a reader that goes away, or says what is no HTTP, is its own affair."""

"""What operators see of calls while they run: metrics, and spans where traces are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector

from blend.config import OperationsConfig
from blend.errors import InvalidConfig
from blend.types import Answer
from blend_server.operations import context
from blend_server.operations.figures import Figures, Sources
from blend_server.operations.hot import HotChunks
from blend_server.operations.requests import RequestMetrics
from blend_server.operations.tenants import TenantCounts

if TYPE_CHECKING:
    from blend_server.operations.traces import CallSpan, Tracing

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


class Observer:
    """Sees every call of a server.

    Args:
        tracing: makes spans; ``None`` makes none.

    Attributes:
        registry: the server's metrics.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        # When a series began, which would be as many series again.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry)
        self.tenants = TenantCounts()
        self.hot = HotChunks()
        self._tracing = tracing
        ProcessCollector(registry=self.registry)

    def watch(self, sources: Sources) -> None:
        """Collect what these tell, too, whenever the metrics are asked for."""
        self.registry.register(Figures(sources, self.hot, self.tenants))

    def call(self, method: str, request_id: str, metadata: Metadata) -> Call:
        """Return a call that begins, and make it :data:`current`."""
        span = None if self._tracing is None else self._tracing.begin(method, request_id, metadata)
        call = Call(self, method, span)
        current.set(call)
        return call

    def close(self) -> None:
        """Send the last spans."""
        if self._tracing is not None:
            self._tracing.close()


class Call:
    """One call, from its beginning to :meth:`ended`. Belongs to the event loop's thread."""

    def __init__(self, observer: Observer, method: str, span: CallSpan | None) -> None:
        self._observer = observer
        self._method = method
        self._span = span
        self._tenant: str | None = None
        self._begun = perf_counter()
        self._generated: float | None = None
        observer.metrics.began(method)
        context.tenant.set("")
        context.trace_id.set("" if span is None else span.trace_id)

    def identified(self, tenant: str) -> None:
        """Take note of whose call it is."""
        self._tenant = tenant
        context.tenant.set(tenant)
        if self._span is not None:
            self._span.identified(tenant)

    def generating(self, ended: asyncio.Future[None]) -> None:
        """Take note of when the answer is generated, which may be long before its reader has all of it."""
        ended.add_done_callback(self._note_end)

    def _note_end(self, _: asyncio.Future[None]) -> None:
        self._generated = perf_counter()

    def answered(self, answer: Answer, arrived: float, retrieve_ms: float) -> None:
        """Take note of an answer, and of when its request arrived, as a reading of :func:`time.perf_counter`."""
        comparison = answer.report.comparison
        end = (self._generated or perf_counter()) - (comparison.full_ms / 1e3 if comparison is not None else 0.0)
        first = arrived + answer.report.timings.ttft / 1e3
        self._observer.metrics.answered(answer, retrieve_ms, max(0.0, end - first))
        self._observer.hot.read(answer.report.chunks)
        if self._tenant is not None:
            self._observer.tenants.answered(self._tenant, answer.usage)
        if self._span is not None:
            self._span.answered(answer, arrived, retrieve_ms, max(first, end))

    def ended(self, code: str) -> None:
        """Take note of the gRPC status code that the call ends with."""
        self._observer.metrics.ended(self._method, code, perf_counter() - self._begun)
        if self._tenant is not None:
            self._observer.tenants.called(self._tenant, code)
        if self._span is not None:
            self._span.end(code)


current: ContextVar[Call] = ContextVar("current_call")
"""The call that this task serves."""


def open_observer(operations: OperationsConfig) -> Observer:
    """Return what the settings ask for.

    Raises:
        InvalidConfig: traces are asked for, and OpenTelemetry is not installed.
    """
    if operations.traces is None:
        return Observer()
    try:
        from blend_server.operations.traces import Tracing
    except ImportError as error:
        allowed = "none, for OpenTelemetry is not installed: pip install 'blendkv[otel]'"
        raise InvalidConfig("operations.traces", operations.traces, allowed) from error
    return Observer(Tracing(operations.traces))

"""OpenTelemetry spans of calls. Importing this needs the extra ``blendkv[otel]``.

A call's span is a child of its client's, which the metadata names as W3C Trace Context has it. The spans of an answer's
parts are made when it has ended, from the times in its report. No span holds a text of a document, question or answer.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from time import perf_counter_ns, time_ns

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import blend
from blend.types import Answer, Phase, Report

SERVICE = "blend.v1.BlendService"

_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that are the server's fault, as the semantic conventions for rpcs have it."""
_CODES: Mapping[str, int] = {code.name: code.value[0] for code in grpc.StatusCode}
_PARTS = ("queue", "lookup", "fetch", "rotate", "select", "recompute")
_EXPORT_SECONDS = 5.0


class Tracing:
    """Makes spans and sends them, in batches and from a thread of its own, to a collector that takes OTLP over gRPC.

    OpenTelemetry's own environment variables hold, such as ``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.

    Args:
        collector: its URL; with ``http`` spans are sent unencrypted.
    """

    def __init__(self, collector: str) -> None:
        resource = Resource.create(
            {
                "service.name": "blend-server",
                "service.version": blend.__version__,
                "service.instance.id": str(uuid.uuid4()),
            }
        )
        exporter = OTLPSpanExporter(collector, insecure=collector.startswith("http://"), timeout=_EXPORT_SECONDS)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("blend_server", blend.__version__)

    def begin(self, method: str, request_id: str, metadata: Iterable[tuple[str, str | bytes]]) -> CallSpan:
        """Return the span of a call that begins."""
        sent = {key: value for key, value in metadata if isinstance(value, str)}
        attributes: dict[str, AttributeValue] = {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": method,
            "blend.request_id": request_id,
        }
        parent = TraceContextTextMapPropagator().extract(sent)
        span = self._tracer.start_span(f"{SERVICE}/{method}", parent, SpanKind.SERVER, attributes)
        return CallSpan(self._tracer, span)

    def close(self) -> None:
        """Send what has ended, and end the thread."""
        self._provider.shutdown()


class CallSpan:
    """The span of one call.

    Attributes:
        trace_id: of its trace, 32 hex digits.
    """

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def identified(self, tenant: str) -> None:
        """Say whose call it is."""
        self._span.set_attribute("blend.tenant", tenant)

    def answered(self, answer: Answer, arrived: float, retrieve_ms: float, end: float) -> None:
        """Say what an answer did, and make the spans of its parts. ``arrived`` and ``end``: when it began and ended."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(_attributes(answer))
        first = arrived + answer.report.timings.ttft / 1e3
        self._part("retrieve", [Phase("retrieve", arrived, arrived + retrieve_ms / 1e3)])
        phases = sorted(_phases(answer.report, first), key=lambda phase: (_PARTS.index(phase.name), phase.start))
        for name, found in groupby(phases, key=lambda phase: phase.name):
            self._part(name, list(found))
        self._part("decode", [Phase("decode", first, end)])

    def _part(self, name: str, phases: list[Phase]) -> None:
        """A span from a part's beginning to its end; what was done to each layer in it are its events."""
        parent = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(name, parent, start_time=_epoch_ns(phases[0].start))
        span.set_attribute("blend.busy_ms", sum(_milliseconds(phase) for phase in phases))
        for phase in phases:
            if phase.layer is not None:
                attributes = {"blend.layer": phase.layer, "blend.busy_ms": _milliseconds(phase)}
                span.add_event("layer", attributes, _epoch_ns(phase.start))
        span.end(_epoch_ns(max(phase.end for phase in phases)))

    def end(self, code: str) -> None:
        """End it with the call's gRPC status code."""
        self._span.set_attribute("rpc.grpc.status_code", _CODES[code])
        if code in _FAULTS:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _attributes(answer: Answer) -> dict[str, AttributeValue]:
    report = answer.report
    chunks = Counter(chunk.outcome for chunk in report.chunks)
    tiers = sorted({chunk.tier for chunk in report.chunks if chunk.tier is not None})
    return {
        "blend.mode": report.mode,
        "blend.reason": report.reason,
        "blend.prompt_tokens": report.tokens,
        "blend.cached_tokens": report.cached,
        "blend.selected_tokens": report.selected,
        "blend.generated_tokens": len(answer.token_ids),
        "blend.charged_ratio": report.charged_ratio,
        "blend.ttft_ms": report.timings.ttft,
        "blend.predicted_ms": report.predicted_ms,
        "blend.finish": answer.finish_reason,
        "blend.tiers": tiers,
        **{f"blend.chunks.{outcome}": count for outcome, count in chunks.items()},
    }


def _phases(report: Report, first: float) -> Iterable[Phase]:
    """A report's phases; where its engine tells none, its parts one after another up to the first token."""
    if report.phases:
        return report.phases
    parts = [(name, getattr(report.timings, name) / 1e3) for name in _PARTS]
    begin, found = first - sum(seconds for _, seconds in parts), []
    for name, seconds in parts:
        if seconds > 0:
            found.append(Phase(name, begin, begin + seconds))
        begin += seconds
    return found


def _milliseconds(phase: Phase) -> float:
    return (phase.end - phase.start) * 1e3


def _epoch_ns(reading: float) -> int:
    """The time that a reading of :func:`time.perf_counter` was made at, in nanoseconds since 1970."""
    return time_ns() - perf_counter_ns() + round(reading * 1e9)

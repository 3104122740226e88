"""The trace that a call belongs to, for the server: W3C Trace Context in the metadata."""

from __future__ import annotations

import sys


def headers() -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the current OpenTelemetry span; none where there is no span.

    It imports nothing: where the program has not imported OpenTelemetry, no span can be current.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())

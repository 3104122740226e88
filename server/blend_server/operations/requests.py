"""Metrics of calls and answers, counted as they happen."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blend.types import Answer, Report
from blend_server.operations.reasons import short

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)

PARTS = ("queue", "lookup", "fetch", "rotate", "select", "recompute")
"""The parts of TTFT that a report tells; ``retrieve`` comes before them."""


class RequestMetrics:
    """Counts calls and answers.

    Args:
        registry: gets the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"blend_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"blend_{name}", what, labels, buckets=buckets, registry=registry)

        self._calls = counter("requests_total", "Calls that have ended.", "method", "code")
        self._refused = counter("queue_refused_total", "Calls refused for want of a place or a quota.", "method")
        self._seconds = histogram("request_seconds", "Seconds from a call's beginning to its end.", _SECONDS, "method")
        self._in_flight = Gauge("blend_requests_in_flight", "Calls under way.", ["method"], registry=registry)

        self._answers = counter("answers_total", "Answers, by the method that ran and why.", "mode", "reason")
        self._finishes = counter("answers_finished_total", "Answers, by what ended them.", "finish")
        self._ttft = histogram("ttft_seconds", "Time to first token, from the call's arrival.", _SECONDS, "mode")
        self._parts = histogram("ttft_part_seconds", "Seconds of the time to first token, by part.", _SECONDS, "part")
        self._token = histogram("token_seconds", "Mean seconds a token of an answer behind its first one.", _SECONDS)
        self._prompt = counter("prompt_tokens_total", "Prompt tokens: cached or mandatory.", "kind")
        self._selected = counter("selected_tokens_total", "Cached tokens that were recomputed.")
        self._generated = counter("generated_tokens_total", "Tokens of answers.")
        self._charged = histogram("charged_ratio", "Charged share of the cached tokens.", _RATIOS, "mode")
        self._share = histogram("selected_ratio", "Selected share of the cached tokens.", _RATIOS, "mode")
        self._chunks = counter("chunks_total", "Chunks of prompts, by outcome and tier.", "outcome", "tier")
        self._read = counter("read_bytes_total", "Bytes of chunks that were read, by tier.", "tier")
        self._prefill = counter("prefill_seconds_total", "Seconds of prefill, waiting for the engine left out.")
        self._full = counter("full_prefill_seconds_total", "What full prefill would have taken, as estimated.")

    def began(self, method: str) -> None:
        """Count a call that begins."""
        self._in_flight.labels(method).inc()

    def ended(self, method: str, code: str, seconds: float) -> None:
        """Count a call that has begun, and ends with that gRPC status code."""
        self._in_flight.labels(method).dec()
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)
        if code == "RESOURCE_EXHAUSTED":
            self._refused.labels(method).inc()

    def answered(self, answer: Answer, retrieve_ms: float, decode_seconds: float) -> None:
        """Count an answer: how long its passages took to find, and its tokens behind the first one to generate."""
        report, produced = answer.report, len(answer.token_ids)
        self._answers.labels(report.mode, short(report.reason)).inc()
        self._finishes.labels(answer.finish_reason).inc()
        self._generated.inc(produced)
        if produced > 1:
            self._token.observe(decode_seconds / (produced - 1))
        self._parts.labels("retrieve").observe(retrieve_ms / 1e3)
        self._prefilled(report)

    def _prefilled(self, report: Report) -> None:
        timings, mode = report.timings, report.mode
        self._ttft.labels(mode).observe(timings.ttft / 1e3)
        for part in PARTS:
            self._parts.labels(part).observe(getattr(timings, part) / 1e3)
        self._prefill.inc(sum(getattr(timings, part) for part in PARTS[1:]) / 1e3)
        self._full.inc(report.full_estimate_ms / 1e3)
        self._prompt.labels("cached").inc(report.cached)
        self._prompt.labels("mandatory").inc(report.mandatory)
        self._selected.inc(report.selected)
        if report.cached:
            self._charged.labels(mode).observe(report.charged_ratio)
            self._share.labels(mode).observe(report.selected_ratio)
        for chunk in report.chunks:
            self._chunks.labels(chunk.outcome, chunk.tier or "none").inc()
            if chunk.tier is not None:
                self._read.labels(chunk.tier).inc(chunk.nbytes)

"""Metrics that are collected when they are asked for: which there are, and a sheet to fill them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


class Family(NamedTuple):
    """One metric: its name without ``blend_``, what it is, and its labels."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    what: str
    labels: tuple[str, ...] = ()


_BUILD = ("version", "python", "torch", "transformers", "vllm", "mooncake", "engine")
_MODEL = ("model", "fingerprint", "tokenizer", "dtype", "device", "layout_version", "tensor_parallel", "protocol")

FAMILIES = (
    Family("gauge", "serving", "1 while new calls are taken; 0 while the server starts, drains, or has failed."),
    Family("gauge", "build_info", "Always 1; the version matrix is in the labels.", (*_BUILD, *_MODEL)),
    Family("gauge", "places_held", "Answers and documents that hold a place before the engine."),
    Family("gauge", "places", "Places before the engine; one more is refused."),
    Family("gauge", "queue_requests", "Requests in the engine: waiting to begin, or running.", ("state",)),
    Family("gauge", "open_tenants", "Tenants whose documents and index are open."),
    Family("counter", "audit_failures_total", "Lines that the audit log could not be given."),
    Family("gauge", "hot_chunk_share", "Share of the reads that the most read chunks have, by rank.", ("rank",)),
    Family("gauge", "memory_bytes", "The device's memory: what requests hold, promise, and may take.", ("kind",)),
    Family("gauge", "tier_up", "1 while a tier can be used.", ("tier",)),
    Family("gauge", "tier_objects", "Objects in a tier.", ("tier",)),
    Family("gauge", "tier_used_bytes", "Bytes that a tier holds.", ("tier",)),
    Family("gauge", "tier_capacity_bytes", "Bytes that a tier may hold.", ("tier",)),
    Family("gauge", "tier_quarantined_objects", "Corrupt objects that are set aside.", ("tier",)),
    Family("counter", "tier_hits_total", "Look-ups that a tier could serve.", ("tier",)),
    Family("counter", "tier_misses_total", "Look-ups that it could not.", ("tier",)),
    Family("counter", "tier_failures_total", "Look-ups, reads and writes that failed.", ("tier",)),
    Family("counter", "tier_evictions_total", "Objects evicted for others.", ("tier",)),
    Family("counter", "tier_breaker_opened_total", "Times that a tier was given up for a while.", ("tier",)),
    Family("gauge", "load_bytes", "Bytes being loaded from slower tiers now."),
    Family("gauge", "load_capacity_bytes", "Most bytes that may be loaded at once."),
    Family("gauge", "loads_waiting", "Groups of objects that wait to be loaded."),
    Family("counter", "loads_total", "Objects asked of slower tiers, by what became of them.", ("outcome",)),
    Family("counter", "single_flight_joins_total", "Asked for while it was under way for another.", ("what",)),
    Family("counter", "replanned_total", "Requests planned again, for a chunk was lost while it was used."),
    Family("gauge", "write_staging_bytes", "Bytes that wait to be written to lower tiers."),
    Family("gauge", "write_staging_capacity_bytes", "Most bytes that may wait there."),
    Family("gauge", "writes_waiting", "Writes that wait."),
    Family("gauge", "dirty_bytes", "Bytes that are in the fastest tier alone and still to be written."),
    Family("counter", "write_errors_total", "Writes that failed, by the event that did not come.", ("event",)),
    Family("counter", "write_retries_total", "Further attempts at writes."),
    Family("counter", "encoded_chunks_total", "Chunks whose KV was computed to be stored."),
    Family("gauge", "precompute_backlog", "Chunks that requests missed and that wait to be computed."),
    Family("counter", "precompute_total", "Missed chunks, by what became of computing them.", ("outcome",)),
    Family("gauge", "conditioning_backlog", "Chunks of open tenants that wait to be encoded behind their neighbours."),
    Family("counter", "conditioning_total", "Chunks to be encoded behind others, by what became of it.", ("outcome",)),
    Family("counter", "conditioning_seconds_total", "Time that encoding chunks behind their neighbours took."),
    Family("counter", "shadow_requests_total", "Requests chosen to be compared, by what became of it.", ("outcome",)),
    Family("gauge", "shadow_pending", "Requests that wait to be compared with full prefill."),
    Family("gauge", "shadow_tripped", "1 while auto runs full prefill, for its loss was too high."),
    Family("histogram", "shadow_kl", "First-token KL against full prefill, in nats, by method.", ("method",)),
    Family("counter", "shadow_agreed_total", "Comparisons with the same likeliest token.", ("method",)),
    Family("gauge", "shadow_mean_kl", "Mean of the last compared requests, in nats.", ("method",)),
    Family("gauge", "shadow_upper_kl", "Upper end of that mean's confidence interval, one-sided at 95%.", ("method",)),
    Family("counter", "tenant_requests_total", "Calls of a tenant that have ended.", ("tenant", "code")),
    Family("counter", "tenant_tokens_total", "Tokens of a tenant's answers.", ("tenant", "kind")),
    Family("gauge", "tenant_chunks", "Chunks of an open tenant: conditioned, or waiting for it.", ("tenant", "state")),
    Family("gauge", "tenant_bytes", "KV that a tenant holds in a tier.", ("tenant", "tier")),
    Family("gauge", "tenant_quota_bytes", "KV that it may hold there, where it has a quota.", ("tenant", "tier")),
)


_KINDS: dict[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Sheet:
    """The values of one scrape. Metrics without any are left out."""

    def __init__(self) -> None:
        self._families = {family.name: _empty(family) for family in FAMILIES}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Give a gauge or counter of :data:`FAMILIES` a value."""
        self._families[name].add_metric(labels, value)

    def distribute(self, name: str, at_most: Sequence[tuple[float, int]], count: int, total: float, label: str) -> None:
        """Give a histogram its values: how many were at most each bound, how many there were, and their sum."""
        buckets = [*((str(bound), seen) for bound, seen in at_most), ("+Inf", count)]
        self._families[name].add_metric([label], buckets, total)

    def __iter__(self) -> Iterator[Metric]:
        return (family for family in self._families.values() if family.samples)


def empty() -> Iterator[Metric]:
    """Yield all metrics without values."""
    return map(_empty, FAMILIES)


def _empty(family: Family) -> Any:
    return _KINDS[family.kind](f"blend_{family.name}", family.what, labels=family.labels)

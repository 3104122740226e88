"""What engine, store and server tell when they are asked: collected at each scrape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from blend.errors import BlendError
from blend.stats import EngineStats, ShadowStats
from blend.versions import Environment, environment
from blend_server import audit
from blend_server.operations import sheet
from blend_server.operations.hot import HotChunks
from blend_server.operations.sheet import Sheet
from blend_server.operations.tenants import TenantCounts

if TYPE_CHECKING:
    from blend_server.conditioning import ConditioningStats

logger = logging.getLogger("blend_server")


@dataclass(frozen=True)
class Sources:
    """Where figures come from. Each is called from the page's threads.

    Args:
        stats: the engine's figures.
        serving: whether new calls are taken.
        places_held: places before the engine that are taken.
        places: how many there are.
        open_tenants: tenants that are open.
        conditioning: figures of chunks that are encoded behind their neighbours; ``None`` where none are.
        tenants: names of the tenants that have metrics of their own.
    """

    stats: Callable[[], EngineStats]
    serving: Callable[[], bool]
    places_held: Callable[[], int]
    places: int
    open_tenants: Callable[[], int]
    conditioning: Callable[[], ConditioningStats | None]
    tenants: Callable[[], Collection[str]]


class Figures(Collector):
    """Collects what :data:`~blend_server.operations.sheet.FAMILIES` lists.

    Args:
        sources: where from.
        hot: which chunks are read most.
        counts: what each tenant has asked for.
    """

    def __init__(self, sources: Sources, hot: HotChunks, counts: TenantCounts) -> None:
        self._sources = sources
        self._hot = hot
        self._counts = counts

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values."""
        return sheet.empty()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have values now. Of an engine that cannot tell, there are none."""
        filled = Sheet()
        names = self._sources.tenants()
        self._server(filled)
        self._tenants(filled, names)
        if (conditioning := self._sources.conditioning()) is not None:
            _conditioning(filled, conditioning, names)
        try:
            stats = self._sources.stats()
        except BlendError as error:
            logger.warning("event=no_figures error=%s", type(error).__name__)
        else:
            _engine(filled, stats, names)
        return iter(filled)

    def _server(self, filled: Sheet) -> None:
        sources = self._sources
        filled.set("serving", float(sources.serving()))
        filled.set("places_held", sources.places_held())
        filled.set("places", sources.places)
        filled.set("open_tenants", sources.open_tenants())
        filled.set("audit_failures_total", audit.failures.count)
        for rank, share in enumerate(self._hot.shares, 1):
            filled.set("hot_chunk_share", share, str(rank))

    def _tenants(self, filled: Sheet, names: Collection[str]) -> None:
        calls, tokens = self._counts.snapshot(names)
        for (tenant, code), count in calls.items():
            filled.set("tenant_requests_total", count, tenant, code)
        for (tenant, kind), count in tokens.items():
            filled.set("tenant_tokens_total", count, tenant, kind)


def _conditioning(filled: Sheet, stats: ConditioningStats, names: Collection[str]) -> None:
    filled.set("conditioning_backlog", sum(counts.waiting for counts in stats.tenants.values()))
    filled.set("conditioning_total", stats.done, "done")
    filled.set("conditioning_total", stats.failed, "failed")
    filled.set("conditioning_seconds_total", stats.seconds)
    for tenant, counts in stats.tenants.items():
        if tenant in names:
            filled.set("tenant_chunks", counts.conditioned, tenant, "conditioned")
            filled.set("tenant_chunks", counts.waiting, tenant, "waiting")


def _engine(filled: Sheet, stats: EngineStats, names: Collection[str]) -> None:
    _build(filled, environment(stats))
    for state, count in (("waiting", stats.waiting), ("running", stats.running)):
        if count is not None:
            filled.set("queue_requests", count, state)
    _memory(filled, stats)
    _tiers(filled, stats)
    _traffic(filled, stats)
    counters, background = stats.counters, stats.background
    filled.set("replanned_total", counters.get("replanned", 0))
    filled.set("encoded_chunks_total", counters.get("precomputed", 0))
    if background:
        filled.set("precompute_backlog", background["waiting"])
        for outcome in ("done", "failed", "dropped"):
            filled.set("precompute_total", background[outcome], outcome)
        filled.set("single_flight_joins_total", background["joined"], "precompute")
    if stats.shadow is not None:
        _shadow(filled, stats.shadow)
    for usage in stats.tenants:
        if usage.name is not None and usage.name in names:
            filled.set("tenant_bytes", usage.used_bytes, usage.name, usage.tier)
            if usage.quota_bytes is not None:
                filled.set("tenant_quota_bytes", usage.quota_bytes, usage.name, usage.tier)


def _shadow(filled: Sheet, shadow: ShadowStats) -> None:
    for outcome in ("run", "failed", "dropped", "broken"):
        filled.set("shadow_requests_total", getattr(shadow, outcome), outcome)
    filled.set("shadow_pending", shadow.pending)
    filled.set("shadow_tripped", float(shadow.tripped))
    for method, quality in shadow.methods.items():
        filled.distribute("shadow_kl", quality.kl_buckets, quality.compared, quality.kl_sum, method)
        filled.set("shadow_agreed_total", quality.agreed, method)
        for name in ("mean_kl", "upper_kl"):
            if (value := getattr(quality, name)) is not None:
                filled.set(f"shadow_{name}", value, method)


def _build(filled: Sheet, found: Environment) -> None:
    software = (found.blend, found.python, found.torch, found.transformers, found.vllm or "", found.mooncake or "")
    model = (found.model, found.fingerprint, found.tokenizer, found.dtype, found.device)
    shape = (str(found.layout_version), str(found.tensor_parallel), found.protocol)
    filled.set("build_info", 1, *software, found.engine, *model, *shape)


def _memory(filled: Sheet, stats: EngineStats) -> None:
    if (scratch := stats.scratch) is None:
        return
    for kind in ("planned", "largest", "held", "promised", "available"):
        if (nbytes := getattr(scratch, f"{kind}_bytes")) is not None:
            filled.set("memory_bytes", nbytes, kind)


def _tiers(filled: Sheet, stats: EngineStats) -> None:
    for tier in stats.tiers:
        filled.set("tier_up", float(not tier.down), tier.name)
        if tier.down and not tier.capacity_bytes:
            continue  # it could not tell its figures, and counters must not seem to begin anew
        for name in ("objects", "used_bytes", "capacity_bytes"):
            filled.set(f"tier_{name}", getattr(tier, name), tier.name)
        for name in ("hits", "misses", "failures", "evictions"):
            filled.set(f"tier_{name}_total", getattr(tier, name), tier.name)
        filled.set("tier_quarantined_objects", tier.quarantined, tier.name)
        filled.set("tier_breaker_opened_total", tier.opened, tier.name)


def _traffic(filled: Sheet, stats: EngineStats) -> None:
    """What goes between tiers."""
    loads, writes = stats.loads, stats.writes
    filled.set("load_bytes", loads.inflight_bytes)
    filled.set("load_capacity_bytes", loads.inflight_capacity_bytes)
    filled.set("loads_waiting", loads.waiting)
    for outcome in ("loaded", "failed", "dropped", "late", "expired"):
        filled.set("loads_total", getattr(loads, outcome), outcome)
    filled.set("single_flight_joins_total", loads.joined, "load")
    filled.set("write_staging_bytes", writes.staging_bytes)
    filled.set("write_staging_capacity_bytes", writes.staging_capacity_bytes)
    filled.set("writes_waiting", writes.waiting)
    filled.set("dirty_bytes", writes.dirty_bytes)
    for event in ("copied", "readable", "durable"):
        filled.set("write_errors_total", getattr(writes, f"{event}_errors"), event)
    filled.set("write_retries_total", writes.retries)

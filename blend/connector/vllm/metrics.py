"""What became of requests, as vLLM's statistics of a connector and as metrics in its Prometheus registry.

The scheduler's half counts, for it is where reports come together, once for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blend.connector.vllm.jobs import Report

REQUESTS = ("blended", "full", "failed", "given_up", "refused")
"""What can become of a request that asks to be blended: blended; run at full prefill after all; its blocks were not
filled; ended before they were; refused."""
STAGES = ("waited", "load", "select", "recompute", "paused")
TOKENS = ("cached", "selected", "recomputed", "filled")

_RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Stats(KVConnectorStats):
    """Counts since they were last taken, and the observations that histograms are made of; plain values alone.

    ``data`` has ``requests`` by outcome, ``tokens`` by kind, ``chunks`` and ``bytes`` by tier and outcome, ``encoded``
    chunks, and lists of ``charged`` ratios and of seconds by stage.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.data = {
            "requests": {},
            "tokens": {},
            "chunks": {},
            "bytes": {},
            "encoded": 0,
            "charged": [],
            "seconds": {stage: [] for stage in STAGES},
        }

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data["requests"] and not self.data["encoded"]

    def ended(self, outcome: str) -> None:
        """Count a request by what became of it, one of :data:`REQUESTS`."""
        _count(self.data["requests"], outcome)

    def saw(self, report: Report) -> None:
        """Count a request that has a report."""
        self.ended("full" if report.method == "full" else "blended")
        for kind in TOKENS:
            _count(self.data["tokens"], kind, getattr(report, kind))
        for chunk in report.chunks:
            where = f"{chunk.tier or 'none'}/{chunk.outcome}"
            _count(self.data["chunks"], where)
            _count(self.data["bytes"], where, chunk.nbytes)
        self.data["charged"].append(report.charged_ratio)
        for stage in STAGES:
            self.data["seconds"][stage].append(getattr(report, f"{stage}_ms") / 1e3)

    def encoded(self, chunks: int) -> None:
        """Count missing chunks that were encoded."""
        self.data["encoded"] += chunks

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Add another's observations to these."""
        for name in ("requests", "tokens", "chunks", "bytes"):
            for kind, count in other.data[name].items():
                _count(self.data[name], kind, count)
        self.data["encoded"] += other.data["encoded"]
        self.data["charged"] += other.data["charged"]
        for stage in STAGES:
            self.data["seconds"][stage] += other.data["seconds"][stage]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line says."""
        data = self.data
        hits = sum(count for where, count in data["chunks"].items() if where.endswith("/hit"))
        found: dict[str, int | float] = {
            **{f"requests {outcome}": count for outcome, count in data["requests"].items()},
            "chunks": sum(data["chunks"].values()),
            "chunk hits": hits,
            "chunks encoded": data["encoded"],
            "MB loaded": round(sum(data["bytes"].values()) / 1e6, 1),
        }
        if data["charged"]:
            found["charged ratio"] = round(_mean(data["charged"]), 3)
            found.update((f"{stage} ms", round(_mean(data["seconds"][stage]) * 1e3, 1)) for stage in STAGES)
        return found


class PrometheusMetrics(KVConnectorPromMetrics):
    """The same as metrics named ``vllm:blend_…``, one set for each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]

        def counts(name: str, what: str, *labels: str) -> Any:
            return counter(name=f"vllm:blend_{name}", documentation=what, labelnames=[*labelnames, *labels])

        def observed(name: str, what: str, buckets: Sequence[float], *labels: str) -> Any:
            return histogram(
                name=f"vllm:blend_{name}", documentation=what, buckets=buckets, labelnames=[*labelnames, *labels]
            )

        self._requests = counts("requests", "Requests that asked to be blended, by what became of them.", "outcome")
        self._tokens = counts("tokens", "Tokens of blended requests: cached, selected, recomputed, filled.", "kind")
        self._chunks = counts("chunks", "Chunks of blended requests, by the tier that had them.", "tier", "outcome")
        self._bytes = counts("loaded_bytes", "Bytes of chunks that were loaded, by tier.", "tier")
        self._encoded = counts("encoded_chunks", "Missing chunks that were encoded while no request was under way.")
        self._charged = observed("charged_ratio", "Share of cached tokens that was computed, probes included.", _RATIOS)
        self._seconds = observed("seconds", "Seconds of a blended request, by stage.", _SECONDS, "stage")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what the engine ``engine_idx`` has counted."""
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, count in transfer_stats_data["requests"].items():
            self._requests.labels(*labels, outcome).inc(count)
        for kind, count in transfer_stats_data["tokens"].items():
            self._tokens.labels(*labels, kind).inc(count)
        for where, count in transfer_stats_data["chunks"].items():
            self._chunks.labels(*labels, *where.split("/")).inc(count)
        for where, nbytes in transfer_stats_data["bytes"].items():
            self._bytes.labels(*labels, where.split("/")[0]).inc(nbytes)
        self._encoded.labels(*labels).inc(transfer_stats_data["encoded"])
        for ratio in transfer_stats_data["charged"]:
            self._charged.labels(*labels).observe(ratio)
        for stage, seconds in transfer_stats_data["seconds"].items():
            for value in seconds:
                self._seconds.labels(*labels, stage).observe(value)


def _count(counts: dict[str, int], name: str, by: int = 1) -> None:
    counts[name] = counts.get(name, 0) + by


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

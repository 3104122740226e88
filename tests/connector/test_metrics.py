"""Statistics of the connector: added up, said in a line, and observed as metrics."""

# ruff: noqa: E402 - nothing of vLLM is imported where it is not installed

from __future__ import annotations

import json
from typing import Any

import pytest

from blend.types import ChunkReport
from tests.connector.conftest import require_vllm

require_vllm()

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig

from blend.connector.vllm.jobs import Report
from blend.connector.vllm.metrics import PrometheusMetrics, Stats

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds

REPORT = Report(
    method="query",
    reason="asked for",
    computed=128,
    filled=300,
    cached=250,
    selected=40,
    recomputed=90,
    charged_ratio=0.18,
    chunks=(
        ChunkReport("a", 10, 100, "hit", tier="host", nbytes=4000),
        ChunkReport("b", 110, 150, "hit", tier="disk", nbytes=6000),
        ChunkReport("c", 260, 50, "miss", reason="not stored"),
    ),
    load_ms=20.0,
    select_ms=30.0,
    recompute_ms=150.0,
)


def stats() -> Stats:
    made = Stats()
    made.saw(REPORT)
    made.ended("refused")
    made.encoded(1)
    return made


def test_nothing_has_happened_at_first() -> None:
    assert Stats().is_empty()
    assert not stats().is_empty()


def test_they_travel_as_plain_values_and_add_up() -> None:
    there = Stats(json.loads(json.dumps(stats().to_dict())))
    both = there.aggregate(stats())
    assert both.data["requests"] == {"blended": 2, "refused": 2}
    assert both.data["chunks"] == {"host/hit": 2, "disk/hit": 2, "none/miss": 2}
    assert both.data["bytes"] == {"host/hit": 8000, "disk/hit": 12000, "none/miss": 0}
    assert both.data["tokens"] == {"cached": 500, "selected": 80, "recomputed": 180, "filled": 600}
    line = both.reduce()
    assert (line["chunks"], line["chunk hits"], line["chunks encoded"], line["charged ratio"]) == (6, 4, 2, 0.18)
    assert line["recompute ms"] == 150.0


def test_metrics_have_an_engines_labels_and_their_own() -> None:
    registry = CollectorRegistry()

    def of(kind: Any) -> Any:
        return lambda **settings: kind(registry=registry, **settings)

    kinds = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    metrics = PrometheusMetrics(VllmConfig(), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    metrics.observe(stats().to_dict(), 1)
    metrics.observe(stats().to_dict(), 1)
    engine = {"model_name": "m", "engine": "1"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:blend_{name}", {**engine, **labels})

    assert value("requests_total", outcome="blended") == 2
    assert value("chunks_total", tier="disk", outcome="hit") == 2
    assert value("loaded_bytes_total", tier="host") == 8000
    assert value("tokens_total", kind="recomputed") == 180
    assert value("encoded_chunks_total") == 2
    assert value("charged_ratio_bucket", le="0.15") == 0
    assert value("charged_ratio_bucket", le="0.2") == 2
    assert value("seconds_sum", stage="recompute") == pytest.approx(0.3)
    assert (
        registry.get_sample_value("vllm:blend_requests_total", {**engine, "engine": "0", "outcome": "blended"}) is None
    )

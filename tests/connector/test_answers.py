"""What vLLM says of a request, as blend's report: what is known is there, and nothing else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from blend import Chunk, Plan, Prompt, Text
from blend.config import ConnectorConfig, MooncakeConfig, ResidencyConfig, ResidencySource, StoreConfig
from blend.connector.vllm.answers import Asked, report_of
from blend.recompute.planner import decide
from blend.types import ChunkReport

PROMPT = Prompt([Text([1, 2]), Chunk(range(10, 20)), Chunk(range(20, 28)), Text([3, 4, 5])])


def asked(method: str = "query", positions: bool = True) -> Asked:
    plan = Plan(method) if method in ("full", "prefix", "reuse") else Plan(method, ratio=0.25)
    return Asked(PROMPT, ("key one", "key two"), decide(plan, None), positions, calibrated=False, arrived=0.0)


def told(**changes: Any) -> dict[str, Any]:
    chunks = [
        ChunkReport("key one", 2, 10, "hit", tier="disk", variant="plain", nbytes=640),
        ChunkReport("key two", 12, 8, "miss", reason="not stored"),
    ]
    said = dict(method="query", reason="as asked", computed=2, filled=18, cached=10, selected=4, recomputed=12)
    said |= dict(charged_ratio=0.3, load_ms=5.0, select_ms=6.0, recompute_ms=7.0, waited_ms=2.0, paused_ms=1.0)
    said |= dict(ratio=0.25)  # what is None is not told, as a named method's predicted KL
    return {**said, "chunks": [asdict(c) for c in chunks], "recomputed_positions": [3, 5, 12, 13], **changes}


def test_what_the_connector_tells() -> None:
    report = report_of(asked(), told(), found=20, queue_ms=1.0, ttft_ms=40.0)
    assert (report.mode, report.reason) == ("query", "as asked")
    assert (report.tokens, report.cached, report.mandatory, report.selected) == (23, 10, 13, 4)
    assert (report.requested_ratio, report.selected_ratio, report.charged_ratio) == (0.25, 0.4, 0.3)
    assert [(c.outcome, c.tier, c.nbytes) for c in report.chunks] == [("hit", "disk", 640), ("miss", None, 0)]
    timings = report.timings
    assert (timings.queue, timings.fetch, timings.select, timings.recompute, timings.ttft) == (3.0, 5.0, 6.0, 7.0, 40.0)
    assert (timings.lookup, timings.rotate, report.full_estimate_ms, report.comparison) == (0.0, 0.0, 0.0, None)
    assert any("2 of the prompt's tokens" in warning for warning in report.warnings)
    assert any("no calibration" in warning for warning in report.warnings)


def test_what_auto_chose_once_the_chunks_were_known_is_told() -> None:
    report = report_of(asked(), told(method="head", ratio=0.05, predicted_kl=0.012), 20, 0.0, 1.0)
    assert (report.mode, report.requested_ratio, report.predicted_kl, report.predicted_ms) == ("head", 0.05, 0.012, 0.0)
    assert report_of(asked("full"), None, 0, 0.0, 1.0).predicted_kl == 0.0


def test_positions_are_the_connectors_and_those_that_vllm_computes_behind_them() -> None:
    assert report_of(asked(), told(), 20, 0.0, 1.0).recomputed_positions == (3, 5, 12, 13, 20, 21, 22)
    assert report_of(asked("full"), None, 4, 0.0, 1.0).recomputed_positions == tuple(range(4, 23))
    assert report_of(asked(positions=False), told(), 20, 0.0, 1.0).recomputed_positions is None


def test_a_plan_that_the_connector_gave_up_is_a_full_prefill() -> None:
    report = report_of(
        asked(), told(method="full", reason="why", cached=0, selected=0, charged_ratio=1.0, ratio=1.0), 0, 0.0, 1.0
    )
    assert (report.mode, report.requested_ratio, report.selected_ratio, report.charged_ratio) == ("full", 1.0, 1.0, 1.0)


@pytest.mark.parametrize("method", ["full", "prefix"])
def test_an_exact_method_is_vllms_own(method: str) -> None:
    report = report_of(asked(method), None, found=0, queue_ms=0.0, ttft_ms=1.0)
    assert (report.mode, report.reason, report.cached, report.mandatory) == (method, "as asked", 0, 23)
    assert [(c.key, c.start, c.tokens, c.outcome) for c in report.chunks] == [
        ("key one", 2, 10, "unused"),
        ("key two", 12, 8, "unused"),
    ]
    assert report.warnings == ()


def test_an_identical_requests_blocks_are_no_full_prefill() -> None:
    report = report_of(asked(), None, found=20, queue_ms=0.0, ttft_ms=1.0)
    assert (report.mode, report.cached, report.mandatory, report.charged_ratio) == ("query", 0, 3, 0.0)
    assert "identical" in report.reason and report.chunks == ()


def test_what_was_not_blended_says_so() -> None:
    report = report_of(asked(), None, found=16, queue_ms=0.0, ttft_ms=1.0)
    assert (report.mode, report.charged_ratio) == ("full", 1.0)
    assert "log" in report.reason


def test_the_connectors_settings_go_through_plain_values() -> None:
    residency = ResidencyConfig("a", sources=(ResidencySource("tcp://10.0.0.8:5557"),))
    store = StoreConfig(secret=bytes(range(16)), mooncake=MooncakeConfig("10.0.0.5:50051"), residency=residency)
    for settings in (ConnectorConfig(), ConnectorConfig(model="a", sink=(1, 2), step_share=0.5, store=store)):
        assert ConnectorConfig.of(settings.values()) == settings

"""The planner: from a plan to the method that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blend import Plan
from blend.errors import InvalidConfig, InvalidPlan
from blend.recompute import calibration
from blend.recompute.planner import Decision, decide, settle

FILE = {
    "version": 1,
    "model": "m",
    "data": "made up",
    "questions": 3,
    "default": {"method": "query", "ratio": 0.15},
    "points": [
        {"method": m, "ratio": r, "charged": r, "kl": kl, "kl_low": kl / 2, "kl_high": kl * 2, "top1": 0.9}
        for m, r, kl in (("query", 0.05, 0.1), ("query", 0.15, 0.03), ("query", 0.3, 0.01), ("head", 0.15, 0.02))
    ],
}
KNOWN = calibration.parse(json.dumps(FILE), "test")


def test_a_named_method_runs_as_asked() -> None:
    assert decide(Plan("head", 0.3), None) == Decision("head", 0.3, None, False, "as asked")
    assert decide(Plan("head"), None).ratio == 0.15
    assert decide(Plan("full"), None).ratio == 1.0
    assert decide(Plan("reuse"), None).ratio == 0.0


@pytest.mark.parametrize("name", ["quarry", "oracle", "deviation-released", "FULL"])
def test_an_unknown_method_is_named_with_those_that_exist(name: str) -> None:
    with pytest.raises(InvalidPlan, match=r"method.*auto, full, prefix, reuse, random, head, deviation, query"):
        decide(Plan(name), KNOWN)


def test_auto_without_a_calibration_is_full_prefill_and_says_why() -> None:
    got = decide(Plan(), None)
    assert (got.method, got.reason) == ("full", "this model has no calibration")


@pytest.mark.parametrize(("cap", "ratio"), [(None, 0.15), (0.3, 0.3), (0.9, 0.3), (0.2, 0.15), (0.05, 0.05)])
def test_auto_takes_the_largest_calibrated_ratio_under_the_cap(cap: float | None, ratio: float) -> None:
    got = decide(Plan(max_charged=cap), KNOWN)
    assert (got.method, got.ratio, got.max_charged) == ("query", ratio, cap or 0.15)
    assert f"at ratio {ratio:g}" in got.reason


def test_auto_under_a_cap_below_every_calibrated_charge_is_full_prefill() -> None:
    got = decide(Plan(max_charged=0.01), KNOWN)
    assert (got.method, got.reason) == ("full", "no calibrated setting is charged at most 0.01")


def test_auto_meets_the_quality_target_with_the_least_charge() -> None:
    assert decide(Plan(max_kl=0.2, max_charged=1.0), KNOWN).ratio == 0.05
    got = decide(Plan(max_kl=0.02, max_charged=1.0), KNOWN)
    assert (got.method, got.ratio) == ("head", 0.15)
    assert decide(Plan(max_kl=0.012, max_charged=1.0), KNOWN).ratio == 0.3
    assert decide(Plan(max_kl=0.001, max_charged=1.0), KNOWN).method == "full"
    assert decide(Plan(max_kl=0.012, max_charged=0.2), KNOWN).method == "full", "target and cap cannot both be met"


def test_auto_settles_for_full_prefill_where_blending_saves_nothing() -> None:
    start = decide(Plan(), KNOWN)
    good = dict(cached=1000, probe=30 * 40, rows=60, tokens=1060, layers=30)
    assert settle(start, **good).method == "query"
    assert settle(start, **{**good, "cached": 0}).method == "full"
    assert settle(start, **{**good, "cached": 200}).method == "full", "the probe alone uses up the cap"
    assert settle(start, **{**good, "rows": 9000, "tokens": 10000}).method == "full"
    asked = decide(Plan("query", 0.15), KNOWN)
    assert settle(asked, **{**good, "cached": 0}) == asked


@pytest.mark.parametrize("change", [{"version": 3}, {"points": [{}]}, {"default": {"method": "x", "ratio": 1}}])
def test_a_wrong_calibration_file_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="test"):
        calibration.parse(json.dumps({**FILE, **change}), "test")
    with pytest.raises(InvalidConfig):
        calibration.parse("not json", "test")


def test_a_calibration_beside_the_weights_is_found(tmp_path: Path) -> None:
    assert calibration.load(str(tmp_path), tmp_path) is None
    (tmp_path / "blend_calibration.json").write_text(json.dumps(FILE))
    found = calibration.load(str(tmp_path), tmp_path)
    assert found is not None and found.default.ratio == 0.15


def test_the_embedded_model_has_one(tmp_path: Path) -> None:
    found = calibration.load("smollm2-135m", tmp_path)
    assert found is not None and (found.default.method, found.default.ratio) == ("query", 0.15)

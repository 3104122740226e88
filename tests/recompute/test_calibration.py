"""Calibration files: what is written is read, old files are read too, wrong ones are named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from blend import Plan
from blend.errors import InvalidConfig
from blend.recompute import calibration, machine
from blend.recompute.calibration import Calibration, Curve, Point
from tests import tiny

CURVE = Curve(base=2.0, linear=0.5, square=0.001, fewest=64, most=2048)
POINT = Point("query", 0.15, 0.149, 0.03, 0.02, 0.04, 0.9, 0.85, 0.95, 0.05, 0.04, 0.06)
WHOLE = Calibration("m", "made up", 9, POINT, (POINT,), "a machine", CURVE, {"host": CURVE})


def test_a_calibration_is_read_as_it_was_written() -> None:
    assert calibration.parse(json.dumps(WHOLE.as_dict()), "test") == WHOLE


def test_a_file_of_version_1_is_read_without_curves() -> None:
    old = WHOLE.as_dict()
    for name in ("machine", "prefill", "loads"):
        del old[name]
    for name in [name for name in old["points"][0] if name.startswith(("answer_", "top1_"))]:
        del old["points"][0][name]
    found = calibration.parse(json.dumps({**old, "version": 1}), "test")
    assert (found.prefill, dict(found.loads), found.points[0].answer_kl) == (None, {}, None)
    assert found.default.kl == 0.03


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 3}, "version"),
        ({"version": None}, "version"),
        ({"prefill": {"base": -1, "linear": 1, "square": 0, "fewest": 1, "most": 2}}, "base"),
        ({"prefill": {"base": "1", "linear": 1, "square": 0, "fewest": 1, "most": 2}}, "base"),
        ({"prefill": {"base": 1}}, "linear"),
        ({"loads": [1]}, "items"),
        ({"version": True}, "version"),
        ({"points": []}, "StopIteration"),
        ({"points": [{**asdict(POINT), "kl": "low"}]}, "point: kl"),
        ({"points": [{**asdict(POINT), "kl": float("nan")}]}, "point: kl"),
        ({"points": [{**asdict(POINT), "charged": None}]}, "point: charged"),
        ({"points": [{**asdict(POINT), "ratio": 1.5}]}, "point: ratio.*0 to 1"),
        ({"points": [{**asdict(POINT), "top1_high": 2}]}, "point: top1_high.*0 to 1"),
        ({"points": [{**asdict(POINT), "method": "reuse"}]}, "point: method.*query"),
        ({"questions": "many"}, "questions"),
        ({"questions": 0}, "questions"),
        ({"model": None}, "model"),
        ({"machine": 3}, "machine"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidConfig, match=f"test.*{named}"):
        calibration.parse(json.dumps({**WHOLE.as_dict(), **change}), "test")


def test_nesting_without_end_is_no_calibration() -> None:
    with pytest.raises(InvalidConfig, match="test"):
        calibration.parse("[" * 200_000, "test")


def test_a_curve_says_how_long_a_size_takes() -> None:
    assert CURVE.ms(100) == 2 + 50 + 10


def test_the_curve_of_another_machine_says_nothing_here() -> None:
    assert WHOLE.prefill_on("a machine") == CURVE
    assert WHOLE.prefill_on("another") is None
    described = machine.describe(torch.device("cpu"), torch.float32)
    assert described.endswith("float32") and f"{torch.get_num_threads()} threads" in described


@pytest.mark.parametrize("here", [True, False])
def test_an_engine_estimates_by_the_curve_before_it_has_seen_a_pass(tmp_path: Path, here: bool) -> None:
    model = tiny.save_model(tmp_path / "model")
    where = machine.describe(torch.device("cpu"), torch.float32) if here else "elsewhere"
    fast = {"base": 1e-3, "linear": 0.0, "square": 0.0, "fewest": 1, "most": 1}
    text = json.dumps({**WHOLE.as_dict(), "machine": where, "prefill": fast})
    (model / calibration.FILE_NAME).write_text(text)
    with tiny.engine(model, tmp_path / "store") as engine:
        report = engine.prefill(tiny.prompt(), Plan("full")).report
        if here:
            assert report.full_estimate_ms == 1e-3, "no pass can be faster than what was measured once"
        else:
            assert report.full_estimate_ms > 1e-3


@pytest.mark.parametrize(("method", "warned"), [("query", True), ("reuse", True), ("prefix", False), ("full", False)])
def test_a_model_without_a_calibration_warns_of_each_method_that_may_lose(
    method: str, warned: bool, tmp_path: Path
) -> None:
    model = tiny.save_model(tmp_path / "model")
    with tiny.engine(model, tmp_path / "store") as engine:
        prompt = tiny.prompt()
        engine.precompute(tiny.chunks_of(prompt))
        report = engine.prefill(prompt, Plan(method)).report
        assert report.mode == method
        assert any("no calibration" in warning for warning in report.warnings) == warned

"""Calibration files: what is written is read, old files are read too, wrong ones are named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Plan
from blend.errors import InvalidConfig
from blend.recompute import calibration, machine
from blend.recompute.calibration import Calibration, Curve, Point
from blend.recompute.cost import PassCost, Work
from tests import tiny

CURVE = Curve(base=2.0, linear=0.5, square=0.001, fewest=64, most=2048)
PASSES = PassCost(base=2.0, per_row=0.5, per_key=0.001, fewest=64, most=2048)
POINT = Point("query", 0.15, 0.149, 0.03, 0.02, 0.04, 0.9, 0.85, 0.95, 0.05, 0.04, 0.06)
BEHIND = replace(POINT, kl=0.01, variant="conditioned")
WHOLE = Calibration("m", "made up", 9, POINT, (POINT, BEHIND), "a machine", PASSES, {"host": CURVE})


def test_a_calibration_is_read_as_it_was_written() -> None:
    assert calibration.parse(json.dumps(WHOLE.as_dict()), "test") == WHOLE
    other = replace(WHOLE, default=BEHIND)
    assert calibration.parse(json.dumps(other.as_dict()), "test").default.kl == 0.01, "of two of its method and ratio"


def old(version: int) -> dict[str, Any]:
    """The same as a file of an old version has it: of plain chunks, and of full prefill's times at most."""
    file = {**WHOLE.as_dict(), "version": version, "default": {"method": "query", "ratio": 0.15}}
    del file["passes"]
    file["points"] = [{name: value for name, value in asdict(POINT).items() if name != "variant"}]
    if version == 1:
        for name in ("machine", "loads"):
            del file[name]
        for name in [name for name in file["points"][0] if name.startswith(("answer_", "top1_"))]:
            del file["points"][0][name]
        return file
    return {**file, "prefill": asdict(CURVE)}


def test_a_file_of_version_1_is_read_without_times() -> None:
    found = calibration.parse(json.dumps(old(1)), "test")
    assert (found.passes, dict(found.loads), found.points[0].answer_kl) == (None, {}, None)
    assert (found.default.kl, found.default.variant) == (0.03, "plain")


def test_a_file_of_version_2_is_read_with_full_prefills_times() -> None:
    found = calibration.parse(json.dumps(old(2)), "test")
    assert found.points == (POINT,) and found.loads == {"host": CURVE}
    assert found.passes is not None and (found.passes.fewest, found.passes.most) == (64, 2048)
    for tokens in (64, 300, 2048):
        assert found.passes.of(Work.full(tokens)) == pytest.approx(CURVE.ms(tokens))
    assert calibration.parse(json.dumps({**old(2), "prefill": None}), "test").passes is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 4}, "version"),
        ({"version": None}, "version"),
        ({"passes": {"base": -1, "per_row": 1, "per_key": 0, "fewest": 1, "most": 2}}, "base"),
        ({"passes": {"base": "1", "per_row": 1, "per_key": 0, "fewest": 1, "most": 2}}, "base"),
        ({"passes": {"base": 1}}, "per_row"),
        ({"loads": {"host": {"base": -1, "linear": 1, "square": 0, "fewest": 1, "most": 2}}}, "base"),
        ({"points": [{**asdict(POINT), "variant": "best"}]}, "point: variant.*plain, conditioned"),
        ({"default": {"method": "query", "ratio": 0.15, "variant": "best"}}, "StopIteration"),
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


def test_a_machine_is_described_by_all_that_times_depend_on() -> None:
    described = machine.describe(torch.device("cpu"), torch.float32)
    assert described.endswith("float32") and f"{torch.get_num_threads()} threads" in described


@pytest.mark.parametrize("here", [True, False])
def test_an_engine_predicts_by_what_was_measured_on_its_machine(tmp_path: Path, here: bool) -> None:
    model = tiny.save_model(tmp_path / "model")
    where = machine.describe(torch.device("cpu"), torch.float32) if here else "elsewhere"
    slow = {"base": 1e7, "per_row": 0.0, "per_key": 0.0, "fewest": 1, "most": 1}
    (model / calibration.FILE_NAME).write_text(json.dumps({**WHOLE.as_dict(), "machine": where, "passes": slow}))
    with tiny.engine(model, tmp_path / "store") as engine:
        first = engine.prefill(tiny.prompt(), Plan("full")).report
        assert first.predicted_ms == (1e7 if here else 0.0), "nothing else is known yet"
        assert (first.full_estimate_ms > 1e6) == here, "one pass that is not as predicted changes nothing"
        for seed in range(4):
            report = engine.prefill(tiny.prompt(seed=seed), Plan("full")).report
        assert 0 < report.predicted_ms < 1e6, "but several do"


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

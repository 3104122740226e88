"""``benchmarks/auto.py``: what it makes of its measurements, and that it ends with its figures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blend.types import Report, Timings
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent

with pytest.MonkeyPatch.context() as _patching:
    _patching.syspath_prepend(ROOT / "benchmarks")
    auto = importlib.import_module("auto")

REPORT = Report(
    mode="query",
    reason="",
    tokens=1000,
    cached=900,
    mandatory=100,
    selected=90,
    requested_ratio=0.15,
    selected_ratio=0.1,
    charged_ratio=0.14,
    chunks=(),
    timings=Timings(queue=10.0, first_token=110.0),
    full_estimate_ms=400.0,
    predicted_ms=90.0,
    predicted_kl=0.01,
)


def taken(ms: float, **changes: Any) -> Report:
    return replace(REPORT, timings=Timings(first_token=ms), **changes)


def run(auto_ms: tuple[float, ...] = (100.0,), kl: float = 0.01, **changes: Any) -> Any:
    reports = [taken(ms, **changes) for ms in auto_ms]
    return auto.Run("q", [taken(400.0, mode="full", predicted_ms=500.0)], reports, kl, 2 * kl)


def test_predictions_are_held_against_the_time_without_queueing() -> None:
    assert list(auto.errors([REPORT, replace(REPORT, predicted_ms=0.0)])) == [pytest.approx(0.1)]


def test_figures_are_of_all_questions_and_the_loss_of_blended_ones_too() -> None:
    runs = [run((100.0, 80.0)), run((120.0,), kl=0.05), run((410.0,), kl=0.0, mode="full", predicted_ms=400.0)]
    found = auto.figures(runs)
    assert (found["questions"], found["modes"]) == (3, {"query": 2, "full": 1})
    assert found["kl_first"] == pytest.approx(0.02) and found["kl_answer"] == pytest.approx(0.04)
    assert (found["kl_blended"], found["kl_blended_predicted"]) == pytest.approx((0.03, 0.01))
    assert (found["auto_over_full"], found["auto_over_full_worst"]) == pytest.approx((0.3, 1.025))
    assert found["auto_error"] == pytest.approx(0.1125) and found["auto_within"] == 0.75
    assert found["full_error"] == pytest.approx(0.25) and found["full_within"] == 0.0


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, set()),
        ({"kl_blended": 0.021}, {"quality"}),
        ({"kl_blended": None}, set()),
        ({"auto_over_full_worst": 1.06}, {"slower"}),
        ({"auto_error": 0.21}, {"predictions"}),
        ({"auto_error": None}, {"predictions"}),
    ],
)
def test_the_targets_that_were_missed_are_told(changes: dict[str, Any], missed: set[str]) -> None:
    found = {"kl_blended": 0.02, "auto_over_full_worst": 1.05, "auto_error": 0.2, **changes}
    assert {one.target for one in auto.verdicts(found, 0.02) if not one.met} == missed <= set(auto.BITS)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--questions", "0"], "--questions is 1 or more"),
        (["--repeats", "0"], "--repeats is 1 or more"),
        (["--max-kl", "-1"], "--max-kl -1 is not 0 or more"),
        (["--max-kl", "nan"], "is not 0 or more"),
        (["--max-charged", "2"], "is not from 0 to 1"),
        (["--stored", "best"], "invalid choice"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["auto.py", "--data", "x.json", *flags])
    with pytest.raises(SystemExit) as stopped:
        auto.arguments()
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["plain", "conditioned"])
def test_it_ends_with_its_figures_and_with_what_was_missed(stored: str, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", vocab_size=512, max_position_embeddings=2048)
    point = {"method": "query", "ratio": 0.4, "charged": 0.4, "top1": 1.0, "kl": 0.01, "kl_low": 0.0, "kl_high": 0.015}
    file = {"version": 2, "model": "m", "data": "made up", "questions": 1, "default": point, "points": [point]}
    (model / "blend_calibration.json").write_text(json.dumps(file))
    passages = [{"title": f"T{n}", "text": f"Of thing {n} much is said. " * 6} for n in range(4)]
    rows = [{"question": f"What of {n}?", "answers": ["much"], "ctxs": passages} for n in range(3)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = f"--max-kl 0.02 --max-charged 0.5 --questions 2 --max-new-tokens 3 --stored {stored}".split()
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "auto.py", "--data", "data.json", "--model", model, *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["benchmark"], result["questions"], result["stored"]) == ("auto", 2, stored)
    assert set(result["modes"]) <= {"query", "full"} and result["kl_first"] >= 0
    assert result["auto_error"] is not None and result["auto_over_full_worst"] > 0
    missed = {target for target, met in result["targets"].items() if not met}
    assert ran.returncode == (64 + sum(auto.BITS[target] for target in missed) if missed else 0)

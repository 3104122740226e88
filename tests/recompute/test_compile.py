"""``benchmarks/kernels.py --compile``: what it builds, what it takes for a fault, and all of it once, whole."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blend.recompute.kernels import fit
from blend.recompute.kernels.fit import Shape, shape

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90, 100, 120)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "benchmarks/kernels.py", "--compile"]


@pytest.fixture(autouse=True)
def _ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs triton")
        pytest.skip("triton is not installed")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def cases() -> ModuleType:
    return importlib.import_module("kernel_cases")


@pytest.fixture
def builds() -> ModuleType:
    return importlib.import_module("kernel_builds")


@pytest.mark.parametrize("kernel", ["assemble", "attend", "commit", "deviation", "mass", "move"])
def test_every_two_properties_of_a_kernel_meet(kernel: str, cases: ModuleType) -> None:
    whole, spread = cases.PLANS[kernel]
    values = {"architecture": ARCHITECTURES, **whole, "dtype": cases.DTYPES, **spread}
    every = (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
    wanted = {pair for case in every if cases.ALLOWED[kernel](case) for pair in cases.pairs(case)}
    made = [{"architecture": case.architecture, **dict(case.values)} for case in cases.cases(ARCHITECTURES, [kernel])]
    assert wanted == {pair for case in made for pair in cases.pairs(case)}


def test_every_tile_that_attention_may_choose_is_built(cases: ModuleType) -> None:
    built = set()
    for case in cases.cases(ARCHITECTURES, ["attend"]):
        constants = case.launches()[0].constants
        tile = (constants["BLOCK_M"], constants["BLOCK_N"], constants["num_warps"], constants["num_stages"])
        built.add((case.architecture, *case.size[:2], *tile))
    wanted = {
        (architecture, dtype.itemsize * 8, dims, *shape(dims, dtype, pairs, architecture))
        for architecture in ARCHITECTURES
        for dtype in cases.DTYPES
        for dims in cases.SIZES["dims"]
        for pairs in (*range(1, 300), 10_000)
    }
    assert wanted == built


def narrow(cases: ModuleType) -> Any:
    """Attention at D = 64 in 16 bits, with a tile for few rows, on sm_80."""
    return next(case for case in cases.cases([80], ["attend"]) if case.size == (16, 64, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "said"),
    [
        ((128, 64, 1, 1), "^spills [1-9][0-9]* bytes$"),
        ((16, 512, 4, 3), "^needs [0-9]+ bytes of shared memory where there are 166912$"),
        ((16, 48, 4, 1), "^does not build: .*power of 2"),
    ],
)
def test_what_must_not_be_shipped_is_told(
    tile: tuple[int, int, int, int],
    said: str,
    cases: ModuleType,
    builds: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = narrow(cases)
    attend = importlib.import_module("blend.recompute.kernels.attend")
    monkeypatch.setattr(attend, "shape", lambda *of: Shape(*tile))
    assert re.search(said, builds.build(builds.Build(case, 0, "_attend")).fault, re.DOTALL)


@pytest.mark.slow
def test_of_what_may_be_shipped_nothing_is_told(cases: ModuleType, builds: ModuleType) -> None:
    found = builds.build(builds.Build(narrow(cases), 0, "_attend"))
    assert found.fault == ""
    assert found.registers > 0 < found.shared


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_that_is_shipped_builds_without_spilling() -> None:
    run = subprocess.run(COMMAND, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["planned"] == summary["built"] > 200
    assert (summary["failed"], summary["spilling"], summary["faults"]) == (0, 0, [])
    for architecture in ARCHITECTURES:
        assert 0 < summary["most_registers"][f"sm_{architecture}"] <= 255
        room = fit.LARGE_TILES if fit.large(architecture) else fit.SMALL_TILES
        assert 0 < summary["most_shared"][f"sm_{architecture}"] <= room
    for function in ("_attend", "_merge", "_weigh", "_collect", "_assemble", "_commit", "_deviation", "_move"):
        assert function in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("interrupts_arrive")
def test_an_interrupt_leaves_a_partial_report() -> None:
    command = [*COMMAND, "--kernel", "deviation", "commit", "--jobs", "1"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert " of 80 built" in run.stderr.readline()
        run.send_signal(signal.SIGINT)
        out, error = run.communicate()
    assert run.returncode == 130
    assert "Traceback" not in error
    summary = json.loads(out.splitlines()[-1])
    assert summary["interrupted"]
    assert 0 < summary["built"] < summary["planned"] == 80
    assert "_deviation" in out

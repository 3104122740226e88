"""``blend-eval compare``: exit code 0 where all gates are met, 1 where one is not, 2 where it cannot be told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blend.eval import __main__ as command
from blend.eval import results
from tests.eval import samples
from tests.eval.commands.conftest import Call


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    for name, values in {"a": [0.5, 0.7], "b": [0.475, 0.675]}.items():
        made = samples.records({("full", None): [1.0] * 8, ("query", 0.15): values * 4})
        results.write(tmp_path / name, samples.document(made))
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_gates_decide_the_exit_code(call: Call, two: tuple[str, str]) -> None:
    met = call("compare", *two, "--gate", "f1_drop<=0.03")
    assert met["passed"] and len(met["gates"]) == 2 and met["rows"][1]["differences"]["f1"]["p_holm"] <= 1
    missed = call("compare", *two, "--gate", "f1_drop<=0.02,charged<=1", "--methods", "query", code=1)
    assert [(g["gate"], g["passed"]) for g in missed["gates"]] == [("f1_drop<=0.02", False), ("charged<=1", True)]
    assert call("compare", *two)["passed"]


def test_the_table_says_what_differences_are_worth(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["compare", *two, "--gate", "f1_drop<=0.01"]) == 1
    out = capsys.readouterr().out
    assert "inside the noise" in out and "outside the noise" in out
    assert "gate f1_drop<=0.01, query 0.15: 0.0250: NOT MET" in out and "full: 0.0000: met" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "two results"),
        (["--gate", "k1<=1"], "kl (the nearest)"),
        (["--gate", "top1>=1"], "top1"),
        (["--methods", "head"], "methods of both"),
    ],
)
def test_bad_input_is_exit_code_2(
    two: tuple[str, str], words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["compare", *(two if words else ()), *words]) == 2
    assert named in capsys.readouterr().err


def test_no_gate_is_met_by_rows_that_are_not_there(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.write(tmp_path / "c", samples.document(samples.records({("full", None): [1.0] * 8})))
    words = ["compare", two[0], str(tmp_path / "c")]
    assert command.main([*words, "--gate", "f1_drop<=0.02"]) == 2
    assert "B without query 0.15" in capsys.readouterr().err
    assert command.main([*words, "--gate", "f1_drop<=0.02", "--methods", "full"]) == 0
    assert command.main(words) == 0
    assert "only in A, not compared: query 0.15" in capsys.readouterr().out


def test_times_of_two_machines_are_not_set_against_each_other(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = results.read(two[1])
    results.write(tmp_path / "c", replace(there, environment=replace(there.environment, threads=64)))
    words = ["compare", two[0], str(tmp_path / "c")]
    assert command.main([*words, "--gate", "ttft_p50_rise<=1"]) == 2
    assert "different threads" in capsys.readouterr().err
    assert command.main([*words, "--gate", "ttft_p50<=8,f1_drop<=1"]) == 0


def test_the_table_tells_the_sample_and_paths_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("[red]a", "[", "b:smile:")]
    for path in paths:
        results.write(Path(path), samples.document(samples.records({("full", None): [1.0]})))
    for path in paths[1:]:
        assert command.main(["compare", paths[0], path]) == 0
        shown = "".join(capsys.readouterr().out.split())
        assert path in shown and "[red]a" in shown and "1questions,seed0" in shown


def test_results_of_another_dtype_are_refused(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = samples.document(samples.records({("full", None): [1.0] * 8}), dtype="bfloat16")
    results.write(tmp_path / "c", other)
    assert command.main(["compare", two[0], str(tmp_path / "c")]) == 2
    assert "different dtypes (float32 and bfloat16)" in capsys.readouterr().err

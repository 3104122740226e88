"""``blend-eval`` on a tiny model: what it prints, its help, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blend.eval import __main__ as command
from tests import tiny
from tests.eval import samples


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLEND_CACHE", str(tmp_path / "cache"))
    return tiny.save_model(tmp_path / "model", max_position_embeddings=4096)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return samples.write_data(tmp_path / "data.json")


def test_run_prints_one_json_document(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dataset", str(data), "--model", str(model), "--ratios", "0.2,1", "--max-new-tokens", "4", "--json"]
    assert command.main(["run", "--methods", "full,reuse,query", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = json.loads(printed.out)["rows"]
    assert [(r["method"], r["ratio"]) for r in rows] == [
        ("full", None),
        ("reuse", None),
        ("query", 0.2),
        ("query", 1.0),
    ]
    full, reuse, _, whole = (r["metrics"] for r in rows)
    assert full["first_kl"]["mean"] == 0 and whole["first_kl"]["mean"] == pytest.approx(0, abs=1e-5)
    assert full["top1"]["mean"] == 1.0
    assert reuse["first_kl"]["mean"] > 1e-4
    assert reuse["first_kl"]["low"] <= reuse["first_kl"]["mean"] <= reuse["first_kl"]["high"]
    assert all(r["questions"] == 3 for r in rows)


def test_run_prints_tables_and_what_differences_are_worth(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", "--methods", "reuse", "--dataset", str(data), "--model", str(model)]) == 0
    out = capsys.readouterr().out
    assert "first-token KL" in out and "reuse" in out and "3 questions" in out
    assert "inside the noise: 3 questions are too few to tell" in out


def test_help_names_every_command_and_setting_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    for name in ("run", "sweep", "robustness", "perf", "calibrate", "compare", "report"):
        assert f"    {name}" in listed
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        shown = capsys.readouterr().out
        assert f"examples:\n  blend-eval {name} " in shown and "--config" in shown and "--json" in shown


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--methods", "quarry"], "quarry"),
        (["--ratios", "a"], "ratios"),
        (["--ratios", "2"], "ratio"),
        (["--dataset", "nowhere.json"], "nowhere"),
        (["--limit", "0"], "limit"),
        (["--limt", "3"], "--limit (the nearest)"),
        (["--limt=3"], "--limit (the nearest)"),
        (["astray"], "astray"),
        (["--metrics", "f2"], "f1 (the nearest)"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_arguments_are_named(
    wrong: list[str], named: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", "--model", str(model), *wrong]) == 2
    assert named in capsys.readouterr().err

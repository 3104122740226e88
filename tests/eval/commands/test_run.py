"""``blend-eval run``: the same document each time, and a run that is stopped goes on where it stood."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from blend.engine import Engine
from blend.eval import __main__ as command
from blend.eval import results
from blend.eval.metrics import METRICS
from tests.eval import samples
from tests.eval.commands.conftest import Call

TIMES = frozenset({"ttft_ms", "timings"})


def timeless(value: Any) -> Any:
    """A document without times."""
    if isinstance(value, dict):
        return {name: timeless(inner) for name, inner in value.items() if name not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture
def line(tmp_path: Path, model: Path) -> list[str]:
    data = samples.write_data(tmp_path / "data.json", questions=4)
    methods = "full,reuse,head,deviation,query,random,prefix,closed-book"
    return [
        "run",
        "--dataset",
        str(data),
        "--model",
        str(model),
        "--methods",
        methods,
        "--max-new-tokens",
        "4",
        "--dtype",
        "float32",
    ]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry a time that an engine is made."""
    made: list[str] = []
    real = Engine.__init__

    def init(self: Engine, *given: Any) -> None:
        made.append("engine")
        real(self, *given)

    monkeypatch.setattr(Engine, "__init__", init)
    return made


def test_two_runs_give_the_same_document_apart_from_times(call: Call, line: list[str]) -> None:
    first, second = call(*line), call(*line)
    assert timeless(first) == timeless(second)
    assert first["questions"] == 4 and len(first["records"]) == 4 * 8
    assert all(set(r["metrics"]) == set(METRICS) for r in first["records"])
    assert first["command"].startswith("blend-eval run --dataset ") and first["settings"]["margins"]["f1"] == 0.02
    assert first["identity"]["dtype"] == first["environment"]["dtype"] == "float32"
    assert first["environment"]["threads"] >= 1 and first["environment"]["fingerprint"] == first["identity"]["model"]
    assert first["heatmap"]["method"] == "query" and "chosen" in first["heatmap"]["state"]


def test_nothing_is_written_without_a_results_directory(
    call: Call, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    call(*line)
    assert not list((tmp_path / "here").iterdir())


def test_a_finished_run_is_read_again_without_loading_the_model(
    call: Call, line: list[str], tmp_path: Path, loads: list[str]
) -> None:
    out = tmp_path / "out"
    first = call(*line, "--results", out)
    assert len(loads) == 1 and results.read(out).as_dict() == first
    assert call(*line, "--results", out) == first and len(loads) == 1
    other_margins = call(*line, "--results", out, "--margins", "f1=0.5")
    assert len(loads) == 1 and other_margins["records"] == first["records"]
    assert timeless(call(*line, "--results", out, "--restart")) == timeless(first) and len(loads) == 2


def test_a_run_that_was_stopped_goes_on_where_it_stood(
    call: Call, line: list[str], tmp_path: Path, loads: list[str]
) -> None:
    """From every third line of its journal, the line after it cut in two."""
    whole = call(*line, "--results", tmp_path / "whole")
    lines = (tmp_path / "whole" / "records.jsonl").read_bytes().splitlines(keepends=True)
    for kept in range(0, len(lines), 11):
        out = tmp_path / f"kept{kept}"
        out.mkdir()
        (out / "records.jsonl").write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        found = call(*line, "--results", out)
        assert timeless(found) == timeless(whole)
        old = {json.dumps(r, sort_keys=True) for r in whole["records"]}
        assert sum(json.dumps(r, sort_keys=True) in old for r in found["records"]) >= kept - 2


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_stood(call: Call, line: list[str], tmp_path: Path, model: Path) -> None:
    out, root = tmp_path / "out", Path(__file__).parents[3]
    samples.write_data(tmp_path / "data.json", questions=40)
    process = subprocess.Popen(
        [sys.executable, "-m", "blend.eval", *line, "--results", str(out)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    journal = out / "records.jsonl"
    while process.poll() is None and (not journal.is_file() or journal.read_bytes().count(b"\n") < 12):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = [json.loads(text)["record"] for text in journal.read_text().splitlines()[1:] if '"record"' in text[:12]]
    assert 9 <= len(kept) < 320 and not (out / "results.json").exists()
    found = call(*line, "--results", out)
    assert len(found["records"]) == 320
    assert all(record in found["records"] for record in kept[:-1])


@pytest.mark.parametrize(
    ("changed", "said"),
    [(["--seed", "5"], "seed was 0, is 5"), (["--max-new-tokens", "5"], "max_new_tokens was 4, is 5")],
)
def test_results_of_other_settings_are_not_gone_on_with(
    call: Call, line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: list[str], said: str
) -> None:
    call(*line, "--results", tmp_path / "out")
    assert command.main([*line, "--results", str(tmp_path / "out"), *changed]) == 2
    assert said in capsys.readouterr().err


def test_results_of_other_data_or_weights_are_not_gone_on_with(
    call: Call, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests import tiny

    data = samples.write_data(tmp_path / "data.json")
    own = tiny.save_model(tmp_path / "model", max_position_embeddings=2048)
    line = [
        "run",
        "--dataset",
        str(data),
        "--model",
        str(own),
        "--methods",
        "reuse",
        "--results",
        str(tmp_path / "out"),
    ]
    call(*line)
    samples.write_data(data, words=5)
    assert command.main(line) == 2
    assert "digest was" in capsys.readouterr().err
    samples.write_data(data)
    tiny.save_model(own, seed=1, max_position_embeddings=2048)
    assert command.main(line) == 2
    assert "weights was" in capsys.readouterr().err


def test_the_results_of_another_command_are_not_written_over(
    call: Call, line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    there = samples.document([samples.record("q0", "full", f1=1.0)])
    results.write(out, there)
    assert command.main([*line, "--results", str(out)]) == 2
    assert "other results" in capsys.readouterr().err and results.read(out) == there
    assert command.main(["perf", *line[1:5], "--results", str(out), "--methods", "reuse"]) == 2
    assert "results of another kind" in capsys.readouterr().err, "what was refused left nothing in the way"
    call(*line, "--results", out, "--restart")
    assert command.main(["perf", *line[1:5], "--results", str(out), "--methods", "reuse"]) == 2
    assert "another command's records" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    answered = iter(range(3))
    real = Engine.greedy

    def interrupted(self: Engine, *given: Any, **named: Any) -> Any:
        if next(answered, None) is None:
            raise KeyboardInterrupt
        return real(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "greedy", interrupted)
        assert command.main([*line, "--results", str(tmp_path / "out"), "--json"]) == 130
    shown = capsys.readouterr()
    assert shown.out == "" and "goes on from here" in shown.err
    assert len(call(*line, "--results", tmp_path / "out")["records"]) == 32


def test_every_method_is_run_once_before_the_first_is_timed(
    call: Call, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []
    real = Engine.prefill

    def watched(self: Engine, prompt: Any, plan: Any, **named: Any) -> Any:
        ran.append((named["namespace"], plan.method))
        return real(self, prompt, plan, **named)

    monkeypatch.setattr(Engine, "prefill", watched)
    call(*line)
    methods = ["full", "reuse", "head", "deviation", "query", "random", "prefix"]
    assert ran[:7] == [("warm-up", method) for method in methods]
    assert all(namespace == "evaluation" for namespace, _ in ran[7:])


def test_a_results_file_of_a_newer_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = samples.document([samples.record("q0", "full", f1=1.0)]).as_dict()
    (tmp_path / "results.json").write_text(json.dumps({**made, "version": 2}))
    assert command.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "newer" in capsys.readouterr().err


def test_questions_longer_than_the_model_are_dropped_and_counted(
    call: Call, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = samples.write_data(tmp_path / "data.json")
    rows = json.loads(data.read_text())
    rows[1]["ctxs"][0]["text"] *= 200
    data.write_text(json.dumps(rows))
    line = ["run", "--dataset", str(data), "--model", str(model), "--methods", "reuse"]
    found = call(*line)
    assert found["questions"] == 2 and found["dropped"] == {"longer than the model": 1}
    assert command.main(line) == 0
    assert "dropped, longer than the model: 1" in capsys.readouterr().out

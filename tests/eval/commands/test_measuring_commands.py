"""``robustness``, ``perf`` and ``calibrate`` on a tiny model: what they print, write, go on from, and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blend import Plan
from blend.eval import __main__ as command
from blend.eval import results
from blend.recompute import calibration
from blend.recompute.planner import decide
from tests import tiny


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLEND_CACHE", str(tmp_path / "cache"))
    return tiny.save_model(tmp_path / "model", max_position_embeddings=4096)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """MuSiQue's format, which says what the evidence is. The last question has none."""
    rows = []
    for i in range(3):
        paragraphs = [
            {
                "idx": j,
                "title": f"T{j}",
                "paragraph_text": f"Passage {i} {j} begins. It holds word{j} in its middle. It ends here.",
                "is_supporting": j == 1 and i < 2,
            }
            for j in range(4)
        ]
        rows.append(
            {
                "id": f"q{i}",
                "question": f"What is held by {i}?",
                "answer": "word1",
                "answer_aliases": [],
                "answerable": True,
                "paragraphs": paragraphs,
            }
        )
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model: Path, data: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--dataset", str(data), "--dtype", "float32", "--max-new-tokens", "3", *more]


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


VARIED = ("--methods", "reuse", "--orders", "2", "--chunk-sizes", "32,9999", "--counts", "2,6")


def test_robustness_has_rows_by_condition_and_level(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = ["robustness", *arguments(model, data, *VARIED, "--json", "--results", str(out))]
    assert command.main(line) == 0
    found = printed(capsys)
    assert found["kind"] == "robustness"
    rows = {(r["condition"], r["level"], r["method"]): r for r in found["rows"]}
    conditions = [
        ("order", None, 3),
        ("position", "first", 2),
        ("position", "middle", 2),
        ("position", "last", 2),
        ("boundary", "whole", 2),
        ("boundary", "split", 2),
        ("chunk-size", 32, 3),
        ("count", 2, 3),
        ("count", 6, 3),
    ]
    assert {(c, level, m): r["questions"] for (c, level, m), r in rows.items()} == {
        (c, level, method): questions for c, level, questions in conditions for method in ("full", "reuse")
    }
    assert found["dropped"] == {
        "position: no passage is known as gold beside others": 1,
        "boundary: no gold passage holds an answer": 1,
        "chunk-size 9999: the passages have fewer tokens": 3,
    }
    moved = rows["order", None, "full"]["metrics"]["spread_f1"]
    assert moved["count"] == 3 and moved["mean"] >= 0
    assert "spread_f1" not in rows["count", 2, "full"]["metrics"]
    same = [r["answer"] for r in found["records"] if r["condition"] == "boundary" and r["method"] == "full"]
    assert same[0] == same[1], "full prefill does not see where chunks end"
    assert command.main(line) == 0
    assert printed(capsys)["records"] == found["records"], "nothing is measured again"
    assert results.read(out).kind == "robustness"


def test_robustness_prints_a_table_an_experiment(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["robustness", *arguments(model, data, "--methods", "reuse", "--experiments", "order", "--limit", "1")]
    assert command.main(line) == 0
    shown = capsys.readouterr().out
    assert "order" in shown and "other answers" in shown and "reuse" in shown


FAST = ("--repeats", "1", "--seconds", "0.01", "--lengths", "200,300", "--tokens", "300", "--threads", "1,2")
STREAM = ("--questions", "4", "--requests", "4", "--played", "50", "--skews", "0,2", "--passages", "2")


def test_perf_measures_every_experiment_and_goes_on(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = ["perf", *arguments(model, data, *FAST, *STREAM, "--methods", "reuse", "--json", "--results", str(out))]
    assert command.main(line) == 0
    found = printed(capsys)
    points = found["perf"]["points"]
    assert [p["x"] for p in points if p["experiment"] == "length" and p["method"] == "reuse"] == [200, 300]
    assert [p["x"] for p in points if p["experiment"] == "tier" and p["method"] == "full"] == [
        "host",
        "disk",
        "disk-cold",
    ]
    assert {p["experiment"] for p in points} == {"length", "tier", "hits", "concurrency", "stream"}
    assert {p["method"] for p in points if p["experiment"] == "stream"} == {"full", "prefix", "reuse"}
    (reuse,) = found["perf"]["break_even"]["methods"]
    assert [s["skew"] for s in reuse["streams"]] == [0, 2]
    assert command.main(line) == 0
    assert printed(capsys)["perf"] == found["perf"], "what is there is not measured again"
    assert command.main([*line, "--tokens", "250"]) == 2
    assert "settings" in capsys.readouterr().err


def test_perf_prints_tables(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["perf", *arguments(model, data, *FAST, *STREAM, "--methods", "query", "--experiments", "length,stream")]
    assert command.main(line) == 0
    shown = capsys.readouterr().out
    assert "tokens" in shown and "against prefix" in shown and "query" in shown


def test_calibrate_writes_what_the_engine_reads(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["calibrate", *arguments(model, data, "--methods", "query", "--ratios", "0.3,0.6")]
    line += ["--lengths", "200,300", "--repeats", "1", "--results", str(tmp_path / "out")]
    assert command.main(line) == 0
    assert "first-token KL" in capsys.readouterr().out
    file = model / calibration.FILE_NAME
    # Were it of this machine, auto would see that so small a model is faster without chunks.
    file.write_text(json.dumps({**json.loads(file.read_text()), "machine": "elsewhere"}))
    with tiny.engine(model, tmp_path / "store") as engine:
        made = engine.calibration
        assert made is not None and made.questions == 3
        assert [p.ratio for p in made.points] == [0.3, 0.6]
        assert all(p.charged <= p.ratio for p in made.points), "probes are inside the ratio"
        assert all(p.answer_kl is not None and p.top1_low is not None for p in made.points)
        assert made.passes is not None and made.passes.most == 300 and {p.variant for p in made.points} == {"plain"}
        assert set(made.loads) == {"host", "disk", "disk-cold"}
        prompt = tiny.prompt(chunks=6)
        engine.precompute(tiny.chunks_of(prompt))
        report = engine.prefill(prompt, Plan(max_charged=0.5)).report
        assert report.mode == "query" and report.charged_ratio <= 0.5
        assert not report.warnings
        assert decide(Plan(max_kl=made.points[-1].kl_high, max_charged=1.0), made).method == "query"
    before = made.points
    (model / calibration.FILE_NAME).unlink()
    assert command.main([*line, "--json"]) == 0
    assert calibration.parse(capsys.readouterr().out, "test").points == before, "losses are not measured again"


def test_calibrate_measures_both_variants_in_bounded_time(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["calibrate", *arguments(model, data, "--methods", "random", "--ratios", "0.3", "--lengths", "200")]
    line += [
        "--variants",
        "plain,conditioned",
        "--neighbours",
        "2",
        "--repeats",
        "1",
        "--results",
        str(tmp_path / "out"),
    ]
    assert command.main([*line, "--seconds", "0.001", "--json"]) == 0
    made = calibration.parse(capsys.readouterr().out, "test")
    assert made.questions == 1, "no further one was begun"
    assert [(p.variant, p.method, p.ratio) for p in made.points] == [
        ("plain", "random", 0.3),
        ("conditioned", "random", 0.3),
    ]
    assert made.points[0].kl != made.points[1].kl, "they are other chunks"
    assert command.main([*line, "--seconds", "600", "--json"]) == 0
    more = calibration.parse(capsys.readouterr().out, "test")
    assert more.questions == 3 and more.default.variant == "plain"
    assert command.main(line) == 0
    assert "conditioned" in capsys.readouterr().out


def test_calibrate_refuses_neighbours_where_there_are_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "What?", "answers": ["this"], "ctxs": [{"title": "", "text": "All that there is is this."}]}
    (tmp_path / "one.json").write_text(json.dumps([row]))
    assert command.main(["calibrate", *arguments(model, tmp_path / "one.json", "--variants", "conditioned")]) == 2
    assert "one passage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["calibrate", "--variants", "best", "--output", "x.json"], "plain"),
        (["calibrate", "--variants", "plain,plain", "--output", "x.json"], "each once"),
        (["calibrate", "--neighbours", "0", "--output", "x.json"], "neighbours"),
        (["calibrate", "--seconds", "0", "--output", "x.json"], "seconds"),
        (["calibrate", "--methods", "query,full", "--output", "x.json"], "full"),
        (["calibrate", "--methods", "oracle", "--output", "x.json"], "oracle"),
        (["calibrate", "--output", "nowhere/x.json"], "nowhere"),
        (["calibrate", "--lengths", "0", "--output", "x.json"], "lengths"),
        (["calibrate", "--repeats", "0", "--output", "x.json"], "repeats"),
        (["calibrate", "--lengths", "256,256", "--output", "x.json"], "each once"),
        (["robustness", "--chunk-sizes", "64,64"], "each once"),
        (["robustness", "--experiments", ""], "at least one"),
        (["perf", "--lengths", "512,512"], "each once"),
        (["perf", "--experiments", ""], "at least one"),
        (["perf", "--skews", "0,21"], "skew"),
        (["robustness", "--experiments", "ordr"], "order (the nearest)"),
        (["robustness", "--positions", "frist"], "first (the nearest)"),
        (["robustness", "--orders", "1"], "orders"),
        (["perf", "--experiments", "lenght"], "length (the nearest)"),
        (["perf", "--methods", "oracle"], "oracle"),
        (["perf", "--hits", "2"], "hits"),
        (["perf", "--threads", "0"], "threads"),
        (["perf", "--seconds", "0"], "seconds"),
        (["perf", "--skew", "-1"], "skew"),
        (["perf", "--played", "0"], "played"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(
    wrong: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(wrong) == 2
    assert named in capsys.readouterr().err

"""The document of results: what is written is read again, and what is none is refused with its place."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blend.errors import InvalidInput, NotFound
from blend.eval import results
from blend.eval.stats import Estimate
from blend.eval.values import (
    VERSION,
    Against,
    Heatmap,
    Identity,
    Perf,
    PerfPoint,
    Record,
    Results,
    Row,
)
from blend.versions import Environment

RECORD = Record(
    "q1", "query", 0.15, "x", ("x", "y"), {"f1": 1.0}, 0.15, 0.15, 0.17, 90, 70, "query", {"fetch": 1.0}, 9.0
)
ROW = Row(
    "query",
    0.15,
    1,
    {"f1": Estimate(1.0, 1.0, 1.0, 1)},
    0.17,
    0.15,
    {"p50": 9.0, "p95": 9.0},
    {"fetch": 1.0},
    against={"f1": Against("full", Estimate(0.0, 0.0, 0.0, 1), 1.0, 1.0, True)},
    non_inferior={"f1": False},
)


@pytest.fixture
def document() -> Results:
    return Results(
        "run",
        "blend-eval run",
        {"dataset": "demo", "ratios": [0.15]},
        Environment("0.1.0", "3.11", "2.13", "5.19", "Linux", "some", 2, "cpu"),
        Identity("ab", "tiny", "float32", "cd", "ef"),
        1,
        {"longer than the model": 3},
        0,
        (ROW,),
        (RECORD, replace(RECORD, condition="count", level=8), replace(RECORD, condition="evidence", level="first")),
        Heatmap("q1", "query", 0.15, ("a", "b"), ("mandatory", "chosen"), (None, 0.5), ((0, 1),)),
        Perf((PerfPoint("length", 512, "query", 0.15, 9.0, 9.5, None, 3, {"fetch": 1.0}, {"hit": 0.5}),)),
    )


def test_what_is_written_is_read_again(document: Results, tmp_path: Path) -> None:
    assert results.write(tmp_path / "new", document) == tmp_path / "new" / "results.json"
    found = results.read(tmp_path / "new")
    assert found == results.read(tmp_path / "new" / "results.json") == document
    assert found.records[0].key != found.records[1].key
    raw = json.loads((tmp_path / "new" / "results.json").read_text("utf-8"))
    assert raw["version"] == VERSION and list(raw) == sorted(raw)
    assert raw["records"][0]["condition"] == "" and raw["records"][0]["level"] is None
    assert raw["rows"][0]["metrics"]["f1"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 1}


def test_a_write_that_fails_leaves_the_old_document_and_nothing_else(
    document: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.write(tmp_path, document)

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(results.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        results.write(tmp_path, replace(document, seed=1))
    monkeypatch.undo()
    assert results.read(tmp_path).seed == 0
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_a_document_is_as_private_as_its_owner_wants_files_to_be(document: Results, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = results.write(tmp_path, document)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_numbers_that_json_has_not_are_refused(document: Results, tmp_path: Path) -> None:
    wrong = replace(document, records=(replace(RECORD, ttft_ms=math.nan),))
    with pytest.raises(InvalidInput, match="finite"):
        results.write(tmp_path, wrong)
    assert not (tmp_path / "results.json").exists()


def _changed(document: Results, path: str, value: Any) -> dict[str, Any]:
    raw = document.as_dict()
    at: Any = raw
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name)] if name.isdigit() else at[name]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("version", 2, "newer"),
        ("version", KeyError, "version"),
        ("kind", "ran", "run .the nearest"),
        ("rows.0.method", 3, r"rows\[0\].method"),
        ("records.1.ratio", True, r"records\[1\].ratio"),
        ("records.0.metrics", {"f1": "high"}, "metrics.f1"),
        ("records.0.gold", "x", "a list"),
        ("records.0.anwser", "x", "answer .the nearest"),
        ("identity.prompts", KeyError, "no field prompts"),
        ("seed", 10**400, None),
        ("perf.points.0.x", [], r"x: got \[\]"),
    ],
)
def test_what_is_no_document_is_refused_with_its_place(
    document: Results, tmp_path: Path, path: str, value: Any, named: str | None
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(_changed(document, path, value)), "utf-8")
    if named is None:
        results.read(file)
        return
    with pytest.raises(InvalidInput, match=named):
        results.read(file)


def test_wrong_json_is_named_with_its_line_and_a_missing_file_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"version": 1,\n "kind": }', "utf-8")
    with pytest.raises(InvalidInput, match="line 2"):
        results.read(tmp_path)
    with pytest.raises(NotFound, match="nowhere"):
        results.read(tmp_path / "nowhere")
    (tmp_path / "results.json").write_text("[1]", "utf-8")
    with pytest.raises(InvalidInput, match="results of blend-eval"):
        results.read(tmp_path)

"""``blend-eval report``: results directories in, a page out."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from blend.errors import BlendError, InvalidInput, NotFound
from blend.eval.__main__ import main
from blend.eval.commands.report import ReportSettings, run
from blend.eval.report import render
from blend.eval.results import read, write
from blend.eval.values import Results
from tests.eval.report import documents


def short() -> Results:
    """A run with a row only."""
    return replace(documents.run(), rows=documents.run().rows[:1], records=())


@pytest.fixture
def results(tmp_path: Path) -> list[str]:
    return [str(write(tmp_path / name, made()).parent) for name, made in (("perf", documents.perf), ("run", short))]


def test_the_page_holds_all_results_in_the_order_given(results: list[str], tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    output.write_text("old")
    said = StringIO()
    settings = ReportSettings(results=tuple(results), output=str(output), title="A title")
    assert run(settings, Console(file=said)) == 0
    made = [read(path) for path in results]
    assert output.read_text("utf-8") == render(made, title="A title")
    assert "page.html" in said.getvalue()


def test_json_names_the_page(results: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "page.html")
    assert main(["report", results[1], "--output", output, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == output


def test_no_results_are_refused() -> None:
    with pytest.raises(InvalidInput, match="results"):
        ReportSettings()


@pytest.mark.parametrize("output", ["", "nowhere/page.html"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(output: str, tmp_path: Path) -> None:
    settings = ReportSettings(results=("nowhere",), output=str(tmp_path / output))
    with pytest.raises(InvalidInput, match="output"):
        run(settings, Console(file=StringIO()))


def test_wrong_results_leave_the_page_as_it_is(results: list[str], tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    output.write_text("old")
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({**documents.run().as_dict(), "version": 99}))
    for wrong, error in ((str(newer), InvalidInput), (str(tmp_path / "missing"), NotFound)):
        with pytest.raises(BlendError) as raised:
            run(ReportSettings(results=(results[0], wrong), output=str(output)), Console(file=StringIO()))
        assert isinstance(raised.value, error)
    assert output.read_text() == "old"

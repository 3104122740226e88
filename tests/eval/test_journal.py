"""The journal of a run: what was kept is there again, a torn end is dropped, all else that is wrong is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from blend.errors import InvalidInput, ResourceExhausted
from blend.eval.journal import FILE, Header, Journal
from blend.eval.values import Heatmap, Record
from tests.eval import samples

KNOWN = samples.document([samples.record("q0", "full", f1=1.0)])
HEADER = Header(
    {"limit": 3, "dataset": "demo"}, KNOWN.identity, KNOWN.environment, (("q0", "", None, 0), ("q1", "count", 8, 1)), {}
)
HEATMAP = Heatmap("q0", "query", 0.1, ("a",), ("chosen",), (0.5,), ((0, 1),))


def filled(directory: Path) -> Path:
    with Journal(directory) as journal:
        journal.begin(HEADER)
        journal.add(samples.record("q0", "full", f1=1.0))
        journal.add_heatmap(HEATMAP)
        journal.add(samples.record("q0", "query", 0.1, f1=0.5))
    return directory / FILE


def test_what_was_added_is_there_again_and_more_can_be_added(tmp_path: Path) -> None:
    filled(tmp_path / "new")
    with Journal(tmp_path / "new") as journal:
        assert journal.header == HEADER
        assert journal.heatmap == HEATMAP
        assert [r.method for r in journal.records] == ["full", "query"]
        journal.add(samples.record("q1", "full", f1=0.0))
    with Journal(tmp_path / "new") as journal:
        assert journal.records[2] == samples.record("q1", "full", f1=0.0)


def test_a_last_line_that_was_cut_anywhere_is_dropped(tmp_path: Path) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last, 17):
        path.write_bytes(whole[:-cut])
        with Journal(tmp_path) as journal:
            assert len(journal.records) == 1
            journal.add(samples.record("q0", "query", 0.1, f1=0.5))
        assert path.read_bytes() == whole
    path.write_bytes(whole[:20])
    with Journal(tmp_path) as journal:
        assert journal.header is None and not journal.records


@pytest.mark.parametrize(
    ("line", "wrong", "named"),
    [
        (3, b"{nonsense", "line 3"),
        (3, b'{"recorded": 1}', "a record or a heatmap"),
        (2, b'{"record": {"question": 3}}', "line 2"),
        (1, b'{"header": {"version": 99}}', "got 'a header of version 99'; allowed: a header of version 1"),
        (1, b"[]", "header"),
        (1, b'{"header": {"version": 1, "settings": {}}}', "no field identity"),
        (4, b'{"header": {"version": 1}}', "a record or a heatmap"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: int, wrong: bytes, named: str) -> None:
    path = filled(tmp_path)
    lines = path.read_bytes().splitlines()
    lines[line - 1] = wrong
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InvalidInput, match=named):
        Journal(tmp_path)
    with Journal(tmp_path, restart=True) as journal:
        assert journal.header is None and not journal.records


def test_what_differs_from_the_header_is_said(tmp_path: Path) -> None:
    filled(tmp_path)
    with Journal(tmp_path) as journal:
        journal.check(settings={"limit": 3, "dataset": "demo"}, identity=HEADER.identity)
        with pytest.raises(InvalidInput, match=r"limit was 3, is 4; seed was null, is 1.*--restart"):
            journal.check(settings={"limit": 4, "dataset": "demo", "seed": 1})
        with pytest.raises(InvalidInput, match='dtype was "float32", is "bfloat16"'):
            journal.check(identity=replace(HEADER.identity, dtype="bfloat16"))
        with pytest.raises(InvalidInput, match="threads was 2, is 4"):
            journal.check(environment=replace(HEADER.environment, threads=4))
    with Journal(tmp_path, restart=True) as journal:
        journal.check(settings={"limit": 4})  # a new one has nothing to differ from


PLANNED = [("full", None), ("query", 0.1)]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (samples.record("q0", "full", f1=1.0), "2 times"),
        (samples.record("q7", "full", f1=1.0), "'q7'"),
        (samples.record("q0", "head", 0.1, f1=1.0), "'head', 0.1"),
        (samples.record("q0", "query", 0.2, f1=1.0), "'query', 0.2"),
    ],
)
def test_records_that_nobody_asked_for_are_refused(tmp_path: Path, record: Record, said: str) -> None:
    filled(tmp_path)
    with Journal(tmp_path) as journal:
        journal.check_records(PLANNED)
        journal.add(record)
        with pytest.raises(InvalidInput, match=f"{said}.*--restart"):
            journal.check_records(PLANNED)


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(ResourceExhausted, match="another process"):
        Journal(tmp_path)
    with Journal(tmp_path) as journal:
        assert journal.header is None


def test_numbers_that_json_has_not_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.begin(HEADER)
        with pytest.raises(InvalidInput, match="finite"):
            journal.add(samples.record("q0", "full", f1=float("nan")))
        assert not journal.records


def test_a_record_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from blend.eval.journal import Journal
        from tests.eval import samples
        from tests.eval.test_journal import HEADER
        journal = Journal(Path(sys.argv[1]))
        journal.begin(HEADER)
        journal.add(samples.record("q0", "full", f1=1.0))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=root,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == -signal.SIGKILL
    with Journal(tmp_path) as journal:
        assert [r.question for r in journal.records] == ["q0"]

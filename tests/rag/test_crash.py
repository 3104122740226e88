"""After kill -9 the catalog holds whole documents, and the index agrees with it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blend.rag import Library
from tests.rag.crash_child import open_library, text_of

ROOT = Path(__file__).resolve().parents[2]


def child(directory: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.rag.crash_child", str(directory), mode]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def check(library: Library) -> set[str]:
    """Every document is whole and of one version, and its chunks, and no others, are found. Returns the ids."""
    documents = library.list(1000).documents
    chunks = [row for d in documents for row in library.chunks_of(d.id)]
    stats = library.stats()
    assert stats.chunks == stats.indexed == len(chunks) == sum(d.chunks for d in documents)
    for info in documents:
        text = library.get(info.id).text
        version = int(re.findall(r"version (\d+)", text)[0])
        assert text == text_of(info.id, version)
        rows = library.chunks_of(info.id)
        assert [row.ordinal for row in rows] == list(range(len(rows)))
        assert "".join(text[row.start_char : row.end_char] for row in rows) == text
    keys = {row.content_key for row in chunks}
    assert keys.isdisjoint(orphan.content_key for orphan in library.pending_forget())
    found = library.retrieve("sentence of version", max(1, len(chunks)))
    assert {p.row_id for p in found} == {row.row_id for row in chunks}
    return {d.id for d in documents}


def test_a_kill_between_the_catalogs_commit_and_the_indexs_snapshot(tmp_path: Path) -> None:
    process = child(tmp_path, "commit")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    with open_library(str(tmp_path)) as library:
        assert check(library) == {"second", "third"}
        gone = {orphan.content_key for orphan in library.pending_forget()}
        assert gone and all("first" in key for key in gone)
        best = library.retrieve("Sentence 0 of third in version 1.", 1)[0]
        assert best.document_id == "third"


@pytest.mark.parametrize("seconds", [0.05, 0.4])
def test_a_kill_at_any_moment(tmp_path: Path, seconds: float) -> None:
    process = child(tmp_path, "loop")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.kill()
    process.communicate(timeout=60)
    with open_library(str(tmp_path)) as library:
        check(library)
        generation = library.stats().generation
    with open_library(str(tmp_path)) as library:
        check(library)
        assert library.stats().generation == generation

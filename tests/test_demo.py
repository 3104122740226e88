"""``scripts/demo`` as a newcomer runs it: documents in, five answers with their reports out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.store.mooncake_server import require_mooncake

ROOT = Path(__file__).parents[1]


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "120", "TMPDIR": str(directory)}
    command = ["scripts/demo", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def demo(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Run it to its end; return its status and what it said."""
    process = start(directory, *arguments)
    out, err = process.communicate()
    return process.returncode, out, err


def reports(said: str) -> list[str]:
    """The report's line of each of the five answers, but for how many chunks were conditioned by then."""
    answers = re.sub(r" \(\d+ conditioned\)", "", said).split("Expected: ")[:-1]
    assert len(answers) == 5
    return [line for answer in answers for line in re.findall(r"^TTFT .*$", answer, re.MULTILINE)]


def left_over(directory: Path) -> list[int]:
    """The processes that a demo with its temporary files in ``directory`` has started and not stopped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"TMPDIR={directory}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_answers_five_questions_from_stored_kv(default_model_dir: Path, tmp_path: Path) -> None:
    status, out, err = demo(tmp_path)
    assert status == 0, err[-4000:]
    lines = reports(out)
    assert left_over(tmp_path) == []
    assert len(lines) == 5
    for line in lines:
        assert re.search(
            r"TTFT [\d.]+ m?s \| full prefill [\d.]+ m?s \| speed-up [\d.]+ \| query, charged 0\.\d+ "
            r"\| chunks: \d+ host \| first-token KL \d\.\d+",
            line,
        ), line


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_service_answers_from_the_first_ones_work(default_model_dir: Path, tmp_path: Path) -> None:
    require_mooncake()
    status, out, err = demo(tmp_path, "--mooncake")
    assert status == 0, out[-2000:] + err[-4000:]
    (reused,) = re.findall(r"^(\d+) of (\d+) chunks were reused, 0 computed\.$", out, re.MULTILINE)
    assert reused[0] == reused[1] != "0"
    lines = reports(out)
    assert left_over(tmp_path) == []
    assert len(lines) == 5
    assert re.search(r"\| chunks: 4 mooncake \|", lines[0]), lines[0]
    for line in lines:
        assert re.search(
            r"\| chunks: (\d+ mooncake|\d+ host|\d+ host, \d+ mooncake|\d+ mooncake, \d+ host) \|", line
        ), line


@pytest.mark.slow
@pytest.mark.parametrize("last", ["Starting two services", "Ingesting 40 documents into the first"])
def test_an_interrupted_demo_stops_what_it_started(default_model_dir: Path, tmp_path: Path, last: str) -> None:
    """As from a terminal: the signal goes to the script and all that it runs."""
    require_mooncake()
    process = start(tmp_path, "--mooncake")
    assert process.stdout is not None
    while last not in process.stdout.readline():
        assert process.poll() is None
    assert len(left_over(tmp_path)) >= 2
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert left_over(tmp_path) == []
    assert list(tmp_path.glob("tmp.*")) == []


def test_the_demo_takes_one_flag(tmp_path: Path) -> None:
    for arguments in (["--moon"], ["--mooncake", "again"]):
        status, _, err = demo(tmp_path, *arguments)
        assert status == 2
        assert "usage: scripts/demo [--mooncake]" in err

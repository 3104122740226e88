"""The examples for vLLM, run as their texts say, with the default model in a real vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connector.conftest import require_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
REPORT = r"query, charged 0\.\d+ \| (\d+) of (\d+) tokens from the store \| chunks: (.*) \| ms: load \d+, .*"


def run(name: str, *arguments: str) -> str:
    """Standard output of an example."""
    require_vllm()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "--dtype", "float32", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


@pytest.mark.usefixtures("default_model_dir")
def test_offline(tmp_path: Path) -> None:
    said = run("vllm_offline.py", "--store", str(tmp_path / "store"))
    assert "3 of 3 chunks were computed" in said
    assert "21 nautical miles" in said
    reports = re.findall(REPORT, said)
    assert [where for _, _, where in reports] == ["3 host", "3 host"]
    assert all(0 < int(cached) < int(tokens) for cached, tokens, _ in reports)


@pytest.mark.usefixtures("default_model_dir")
def test_retrieval_before_the_openai_compatible_server(tmp_path: Path) -> None:
    """On one document, so that both questions have the same passages."""
    documents = tmp_path / "documents"
    documents.mkdir()
    name = "03-lighthouse.txt"
    (documents / name).write_bytes((ROOT / "blend" / "eval" / "demo" / "documents" / name).read_bytes())
    said = run("vllm_openai.py", "--documents", str(documents), "--pause", "8")
    assert "chunks of 1 documents can be found" in said
    _, first, second = re.split(r"\n\n(?=.+\nfrom: )", said)  # answers may have blank lines
    assert re.search(r"\[\d+ ms\]\s*\S", first)
    (report,) = re.findall(REPORT, second)
    assert int(report[0]) > 0 and "host" in report[2]

"""``scripts/demo`` as a newcomer runs it: documents in, five answers with their reports out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_answers_five_questions_from_stored_kv(default_model_dir: Path) -> None:
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "120"}
    run = subprocess.run(["scripts/demo"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    answers = run.stdout.split("Expected: ")[:-1]
    assert len(answers) == 5
    for answer in answers:
        (line,) = re.findall(r"^TTFT .*$", answer, re.MULTILINE)
        assert re.search(
            r"TTFT [\d.]+ m?s \| full prefill [\d.]+ m?s \| speed-up [\d.]+ \| query, charged 0\.\d+ "
            r"\| chunks: \d+ host \| first-token KL \d\.\d+",
            line,
        ), line

"""``scripts/cluster-demo`` with a tiny model: a Mooncake master, two engines, a router; one engine killed half way."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.store.mooncake_server import require_mooncake
from tests.test_demo import left_over
from tests.tiny import save_model

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_answer_is_lost_when_an_engine_is_killed(tmp_path: Path) -> None:
    require_mooncake()
    model = save_model(tmp_path / "model", max_position_embeddings=4096)
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "120", "TMPDIR": str(tmp_path)}
    command = ["scripts/cluster-demo", "--model", str(model), "--documents", "12", "--questions", "4"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert left_over(tmp_path) == []
    out = run.stdout
    assert out.endswith("\nNo answer was lost.\n")
    assert re.search(r"12 stored in", out)
    rounds = re.split(r"^(?:Asking, and killing|Asking without|Starting engine a again).*$", out, flags=re.MULTILINE)
    both, killing, without, again = (
        re.findall(r"^  engine ([ab]): TTFT .*chunks: (.*)  ", part, re.MULTILINE) for part in rounds
    )
    assert [len(part) for part in (both, killing, without, again)] == [4, 4, 4, 6]
    assert {engine for engine, _ in both} == {"a", "b"}
    assert {engine for engine, _ in without} == {"b"}
    assert "a" in {engine for engine, _ in again}
    # At first both may have encoded all chunks behind their neighbours; an engine that begins anew has not.
    found = " ".join(tiers for _, tiers in (*both, *again))
    assert "mooncake" in found, "an engine finds what the other one has computed"


def test_it_takes_three_flags() -> None:
    for arguments in (["--moon"], ["--model"], ["--questions", "0"], ["--documents", "100"]):
        run = subprocess.run(
            ["scripts/cluster-demo", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert run.returncode == 2
        assert "usage: scripts/cluster-demo" in run.stderr

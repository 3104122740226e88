"""``benchmarks/load.py``: what it counts as lost or mixed, how load comes, and that it ends with its figures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blend_server.proto.blend.v1 import blend_pb2 as pb
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent

with pytest.MonkeyPatch.context() as _patching:
    _patching.syspath_prepend(ROOT / "benchmarks")
    load, load_checks, load_clients, load_phases, load_server = (
        importlib.import_module(name) for name in ("load", "load_checks", "load_clients", "load_phases", "load_server")
    )


def seen(**changes: Any) -> Any:
    """A request that was answered with two tokens."""
    answer = pb.FinalAnswer(text=changes.pop("text", ""), token_ids=changes.pop("token_ids", [1, 2]))
    made = dict(ask=0, began=1.0, ended=2.0, code="OK", message="", stamps=(1.5, 1.9), passages=b"")
    return load_clients.Seen(**{**made, "answer": answer.SerializeToString(), **changes})


def test_codes_of_other_questions_are_foreign() -> None:
    own, other = (load_clients.Ask(question, 4, "query", 8) for question in load_phases.questions(2, 4))
    code = load_checks.CODE.findall(own.question)
    assert len(code) == 1 and code != load_checks.CODE.findall(other.question)
    answered = seen(text=f"My code is {code[0]}.")
    assert load_checks.foreign(answered, own) == []
    assert load_checks.foreign(answered, other) == code


def test_an_answer_counts_as_differing_once() -> None:
    alone = {0: seen(), 1: seen(token_ids=[7])}
    found = [seen(), seen(token_ids=[1, 3]), seen(token_ids=[1, 3]), seen(token_ids=[1]), seen(ask=1, token_ids=[7])]
    assert load_checks.differing(found, alone) == {0: [(1, 3), (1,)]}


def test_what_ends_otherwise_than_it_may_is_an_error() -> None:
    figures = load_phases.Figures()
    calls = [seen(), seen(code="UNAVAILABLE"), seen(code="RESOURCE_EXHAUSTED"), seen(stamps=())]
    assert figures.check("part", calls, ("OK", "RESOURCE_EXHAUSTED")) == calls[:1]
    assert figures.errors == ["part: UNAVAILABLE: ", "part: an answer without tokens"]


def test_streams_that_decode_together_are_counted_while_all_of_them_do() -> None:
    both = [seen(stamps=(1.0, 2.0, 3.0, 4.0)), seen(stamps=(2.0, 2.5, 3.0, 3.5, 4.5))]
    assert load_phases._together(both) == load_phases.Together(tokens=5, per_second=2.5)
    with pytest.raises(SystemExit, match="ask for more tokens"):
        load_phases._together([seen(stamps=(1.0, 2.0)), seen(stamps=(2.5, 3.0))])


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, set()),
        ({"errors": 1}, {"answers"}),
        ({"mixed": 1, "of_bound": 0.59}, {"answers", "of bound"}),
        ({"ttft_p95_ratio": 0.51, "throughput_ratio": 2.4}, {"TTFT", "throughput"}),
        ({"decode_batch_gain": 3.9, "soak_growth": 0.031}, {"decoding", "steady"}),
        ({"overload_ttft_ratio": 1.6}, {"steady"}),
    ],
)
def test_the_verdicts_tell_what_was_missed(changes: dict[str, float], missed: set[str]) -> None:
    met = dict(errors=0, mixed=0, of_bound=0.6, ttft_p95_ratio=0.5, throughput_ratio=2.5, decode_batch_gain=4.0)
    found = {**met, "soak_growth": 0.03, "overload_ttft_ratio": 1.5, **changes}
    assert {verdict.target for verdict in load.verdicts(found) if not verdict.met} == missed
    assert missed <= set(load.BITS)


def test_numbers_below_one_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["load.py", "--mostly-cached", "0"])
    with pytest.raises(SystemExit):
        load.arguments()
    assert "--mostly-cached is 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", max_position_embeddings=4096)
    flags = "--streams 4 --seconds 1 --mostly-cached 2 --decoding 2 --decoded 160 --soak 60 --overload 30 --no-gate"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "server"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "load.py", "--model", model, *flags.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["benchmark"] == "load"
    assert (result["errors"], result["mixed"], result["soak_requests"]) == (0, 0, 60)
    assert result["overload_accepted"] + result["overload_refused"] == 30
    for name in ("of_bound", "ttft_p95_ratio", "throughput_ratio", "decode_batch_gain", "charged_ratio"):
        assert result[name] > 0
    assert set(result["targets"]) == set(load.BITS)

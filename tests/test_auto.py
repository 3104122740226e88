"""``auto`` in an engine: it decides by what was loaded, and its report says what it predicted and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blend import Engine, Plan, Prompt, Text
from tests import tiny


def point(ratio: float, kl: float, variant: str) -> dict[str, Any]:
    made = {"method": "random", "ratio": ratio, "charged": ratio, "top1": 1.0, "variant": variant}
    return made | {"kl": kl, "kl_low": 0.0, "kl_high": 2 * kl}


POINTS = [point(0.3, 0.05, "plain"), point(0.05, 0.02, "conditioned")]


@pytest.fixture(autouse=True)
def _load_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.load_for_nothing(monkeypatch)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model = tiny.save_model(tmp_path / "model")
    default = {"method": "random", "ratio": 0.3, "variant": "plain"}
    file = {"version": 3, "model": "m", "data": "made up", "questions": 1, "default": default, "points": POINTS}
    (model / "blend_calibration.json").write_text(json.dumps({**file, "passes": None}))
    with tiny.engine(model, tmp_path / "store") as made:
        yield made


TARGET = Plan(max_kl=0.1, max_charged=0.5)


def test_how_chunks_are_stored_decides_the_setting(engine: Engine) -> None:
    prompt = tiny.prompt(chunks=4)
    chunks = tiny.chunks_of(prompt)
    engine.precompute(chunks)
    plain = engine.prefill(prompt, TARGET).report
    assert (plain.mode, plain.requested_ratio, plain.predicted_kl) == ("random", 0.3, 0.05)
    engine.precompute(chunks[1:], behind=[(chunk,) for chunk in chunks[:-1]])
    mixed = engine.prefill(prompt, TARGET).report
    assert {chunk.variant == "plain" for chunk in mixed.chunks} == {True, False}
    assert (mixed.requested_ratio, mixed.predicted_kl) == (0.3, 0.05), "one of them loses more than the others"
    engine.precompute(chunks[:1], behind=[(chunks[-1],)])
    behind = engine.prefill(prompt, TARGET).report
    assert (behind.requested_ratio, behind.predicted_kl) == (0.05, 0.02)
    assert behind.reason.startswith("calibrated mean KL 0.020 (at most 0.040) at ratio 0.05; predicted ")
    only_plain = engine.prefill(prompt, Plan(max_kl=0.1, max_charged=0.5, variant="plain")).report
    assert only_plain.requested_ratio == 0.3


def test_a_target_that_what_was_loaded_cannot_meet_is_full_prefill(engine: Engine) -> None:
    prompt = tiny.prompt(chunks=4)
    chunks = tiny.chunks_of(prompt)
    engine.precompute(chunks)
    got = engine.prefill(prompt, Plan(max_kl=0.05, max_charged=0.5))
    assert (got.report.mode, got.report.cached, got.report.predicted_kl) == ("full", 0, 0.0)
    assert got.report.reason.startswith("no calibrated setting keeps the mean KL of plain chunks under 0.05")
    assert {chunk.outcome for chunk in got.report.chunks} == {"unused"}
    engine.precompute(chunks, behind=[(chunks[-1],), *((chunk,) for chunk in chunks[:-1])])
    assert engine.prefill(prompt, Plan(max_kl=0.05, max_charged=0.5)).report.mode == "random"


def test_an_exact_prefix_is_taken_where_it_is_as_good(engine: Engine) -> None:
    (chunk,) = tiny.chunks_of(tiny.prompt(chunks=1, length=120))
    question = Text(tiny.random_ids(9, 5))
    prompt = Prompt([Text(engine.sink), chunk, question])
    engine.precompute([chunk])
    got = engine.prefill(prompt, TARGET)
    want = engine.prefill(prompt, Plan("full"))
    assert (got.report.mode, got.report.cached, got.report.predicted_kl) == ("prefix", 120, 0.0)
    assert got.report.reason.startswith("an exact prefix of 120 tokens loses nothing; predicted ")
    assert (got.logits - want.logits).abs().max() <= 1e-4 * max(1.0, float(want.logits.abs().max()))


def test_of_an_exact_prefix_and_others_only_it_is_placed(engine: Engine) -> None:
    first, *others = tiny.chunks_of(tiny.prompt(chunks=3, length=120))
    question = Text(tiny.random_ids(9, 5))
    prompt = Prompt([Text(engine.sink), first, *others, question])
    engine.precompute([first, *others])
    strict = Plan(max_kl=0.05, max_charged=0.5)
    got = engine.prefill(prompt, strict)
    want = engine.prefill(prompt, Plan("full"))
    assert (got.report.mode, got.report.cached) == ("prefix", 120), "nothing else meets the target"
    assert [chunk.outcome for chunk in got.report.chunks] == ["hit", "unused", "unused"]
    assert (got.logits - want.logits).abs().max() <= 1e-4 * max(1.0, float(want.logits.abs().max()))


@pytest.mark.parametrize("method", ["full", "reuse", "random", "query"])
def test_every_methods_time_is_predicted_once_something_is_known(engine: Engine, method: str) -> None:
    prompt = tiny.prompt(chunks=4)
    first = engine.prefill(prompt, Plan(method)).report
    assert first.predicted_ms == 0.0, "no pass was seen yet"
    engine.precompute(tiny.chunks_of(prompt))
    report = engine.prefill(prompt, Plan(method)).report
    assert report.predicted_ms > 0 and report.full_estimate_ms > 0
    assert report.predicted_kl == (0.0 if method == "full" else None)


def test_what_blending_saves_is_predicted(engine: Engine) -> None:
    prompt = tiny.prompt(chunks=8, length=100)
    engine.precompute(tiny.chunks_of(prompt))
    for _ in range(3):
        report = engine.prefill(prompt, Plan(max_charged=0.5)).report
    full = engine.prefill(prompt, Plan("full")).report
    assert report.mode == "random" and 0 < report.predicted_ms < full.predicted_ms

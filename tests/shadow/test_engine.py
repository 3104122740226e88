"""Shadows of a real engine's answers: what they measure, and what becomes of ``auto``."""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Answer, Chunk, Engine, Plan, Prompt, Text
from blend.config import ShadowConfig, StoreConfig
from blend.errors import InvalidInput
from blend.serving.job import Job
from tests import tiny

ALL = ShadowConfig(share=1.0)
TRIPS = ShadowConfig(share=1.0, max_kl=1e-9, window=4, least=2)


@pytest.fixture(autouse=True)
def _load_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.load_for_nothing(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose calibration has ``auto`` blend."""
    directory = tiny.save_model(tmp_path_factory.mktemp("llama"))
    point = {"method": "random", "ratio": 0.1, "charged": 0.1, "kl": 0.01, "kl_low": 0.0, "kl_high": 0.02, "top1": 1.0}
    file = {"version": 1, "model": "m", "data": "made up", "questions": 1, "default": point, "points": [point]}
    (directory / "blend_calibration.json").write_text(json.dumps(file))
    return directory


def opened(model: Path, directory: Path, shadow: ShadowConfig, **changes: Any) -> Engine:
    engine = tiny.engine(model, directory / "store", shadow=shadow, **changes)
    engine.precompute(tiny.chunks_of(tiny.prompt()))
    return engine


def ask(engine: Engine, plan: Plan | None = None, **how: Any) -> Answer:
    return engine.generate(tiny.prompt(), max_new_tokens=2, plan=plan, **how)


def test_a_shadow_finds_what_compare_full_finds(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, ALL, shared_rows=16) as engine:
        want = ask(engine, Plan("query", 0.2), compare_full=True).report.comparison
        assert want is not None
        answer = ask(engine, Plan("query", 0.2))
        assert answer.report.comparison is None, "the answer does not wait for it"
        assert engine.wait_idle(60)
        found = engine.stats().shadow
        assert found is not None
        quality = found.methods["query"]
        assert (found.run, quality.compared) == (1, 2)
        assert want.first_token_kl > 1e-4
        assert quality.last_kl == pytest.approx(want.first_token_kl, rel=1e-3)
        assert quality.agreed == 2 * want.top1_agrees


def test_only_what_was_blended_is_compared(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, ALL) as engine:
        ask(engine, Plan("full"))
        ask(engine, Plan("prefix"))
        engine.generate(Prompt([Text((1, 5, 6)), Chunk(tiny.random_ids(20, 77))]), max_new_tokens=1, plan=Plan("reuse"))
        assert engine.wait_idle(60)
        assert engine.stats().shadow.run == 0  # type: ignore[union-attr]
        ask(engine, Plan("reuse"))
        assert engine.wait_idle(60)
        assert engine.stats().shadow.run == 1  # type: ignore[union-attr]


def test_nothing_is_compared_unless_it_is_asked_for(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, ShadowConfig()) as engine:
        ask(engine, Plan("reuse"))
        assert engine.wait_idle(60)
        found = engine.stats().as_dict()["shadow"]
        assert (found["run"], found["dropped"], found["tripped"], found["methods"]) == (0, 0, False, {})


def test_auto_falls_back_to_full_prefill_until_it_is_reset_also_after_a_restart(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model, tmp_path, TRIPS) as engine:
        for number in range(2):
            report = ask(engine, request_id=f"the-{number}").report
            assert report.mode == "random"
            assert report.warnings == ()
            assert engine.wait_idle(60)
        assert "the-1" in " ".join(r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)
        report = ask(engine).report
        assert report.mode == "full"
        assert "quality has stopped auto since 20" in report.reason
        assert "exceeds 1e-09" in report.reason
        named = ask(engine, Plan("query", 0.2)).report
        assert named.mode == "query"
        assert report.reason in named.warnings
        assert not any("stopped" in warning for warning in ask(engine, Plan("full")).report.warnings)
        assert engine.wait_idle(60)
        stats = engine.stats().shadow
        assert stats is not None
        assert (stats.tripped, stats.run, stats.methods["auto"].compared) == (True, 3, 2)

    with opened(model, tmp_path, TRIPS) as engine:
        assert ask(engine).report.mode == "full"
        trip = engine.reset_shadow()
        assert trip is not None
        assert (trip.since, trip.reason) == (stats.since, stats.reason)
        assert ask(engine).report.mode == "random"
        assert engine.reset_shadow() is None

    with opened(model, tmp_path, ALL) as engine:
        assert ask(engine).report.mode == "random"


def test_a_store_in_memory_alone_keeps_it_as_long_as_the_engine(model: Path, tmp_path: Path) -> None:
    store = StoreConfig(host_bytes=64 << 20, disk_bytes=0, directory=tmp_path / "none")
    with opened(model, tmp_path, TRIPS, store=store) as engine:
        for _ in range(2):
            ask(engine, compare_full=True)
        assert ask(engine).report.mode == "full"
    assert not (tmp_path / "none").exists()


def test_the_kl_of_logits_that_are_no_numbers_is_none(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, ALL) as engine:
        ids = torch.tensor(tiny.prompt().token_ids)
        broken = torch.full((engine.decoder.vocab_size,), math.nan)
        job = Job(engine._pipeline.compare(ids, broken))
        assert math.isnan(engine._scheduler.wait(engine._scheduler.submit(job)).first_token_kl)


def test_an_answer_that_was_cancelled_is_compared_too(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, ALL) as engine:
        stream = engine.stream(tiny.prompt(), max_new_tokens=500, plan=Plan("reuse"))
        next(stream)
        stream.close()
        ask(engine, Plan("full"))
        assert engine.wait_idle(60)
        assert engine.stats().shadow.run == 1  # type: ignore[union-attr]


def test_an_engine_closes_with_shadows_pending(model: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    engine = opened(model, tmp_path, ALL, shared_rows=1)
    for _ in range(3):
        ask(engine, Plan("reuse"))
    engine.close()
    assert engine.wait_idle(30)
    found = engine._shadows.stats()
    assert (found.run + found.dropped, found.pending, found.failed) == (3, 0, 0)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é", 5])
def test_a_request_id_that_no_log_line_could_hold_is_refused(model: Path, tmp_path: Path, name: Any) -> None:
    with opened(model, tmp_path, ALL) as engine, pytest.raises(InvalidInput, match="request_id"):
        ask(engine, request_id=name)

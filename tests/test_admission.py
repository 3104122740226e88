"""What is refused for want of memory, and what stats say of it. The rest of what is refused: ``test_engine.py``."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Plan, memory
from blend.errors import ResourceExhausted
from blend.recompute.kept import KEPT
from blend.serving.stream import AnswerStream
from tests import tiny
from tests.serving.fakes import busy


def test_a_prompt_that_memory_cannot_hold_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        short, long = tiny.prompt(1, length=10), tiny.prompt(8, length=60)
        assert engine.stats().scratch.largest_bytes == 0
        engine.prefill(short, Plan("full"))
        enough = engine.stats().scratch.largest_bytes
        assert enough > 0
        monkeypatch.setattr(memory, "available", lambda device: enough)
        engine.prefill(short, Plan("full"))
        refusal = r"prefilling \d+ tokens takes up to \d+ MiB of memory, and cpu has \d+ MiB to spare"
        with pytest.raises(ResourceExhausted, match=refusal):
            engine.prefill(long, Plan("full"))
        with pytest.raises(ResourceExhausted):
            engine.stream(short, max_new_tokens=500)
        assert engine.stats().scratch.largest_bytes == enough
        assert engine.stats().counters["requests"] == 2
        monkeypatch.setattr(memory, "available", lambda device: None)
        engine.prefill(long, Plan("full"))
        assert engine.stats().scratch.largest_bytes > enough


def test_memory_of_canvases_that_are_gone_is_given_up_before_a_prompt_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        prompt = tiny.prompt(2, length=20)
        gone = KEPT.zeros(4 * 2**20)
        del gone
        kept = KEPT.nbytes
        assert kept >= 4 * 2**20
        monkeypatch.setattr(memory, "available", lambda device: 2**40 if KEPT.nbytes == 0 else 5)
        assert engine.stats().scratch.available_bytes == kept + 5
        engine.prefill(prompt, Plan("full"))
        assert KEPT.nbytes == 0


def test_a_prompt_is_refused_when_its_turn_comes_if_memory_has_gone_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        prompt = tiny.prompt(2, length=20)
        engine.precompute(tiny.chunks_of(prompt))
        with busy(engine._scheduler):
            waiting = engine.stream(prompt, max_new_tokens=2, plan=Plan("reuse"))
            monkeypatch.setattr(memory, "available", lambda device: 0)
        with pytest.raises(ResourceExhausted, match="0 MiB to spare"):
            next(waiting)
        monkeypatch.undo()
        assert engine.generate(prompt, max_new_tokens=2, plan=Plan("reuse")).report.cached > 0


def test_a_request_waits_for_the_memory_that_a_running_one_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        prompt = tiny.prompt(2, length=20)
        engine.prefill(prompt, Plan("full"), reserve=30)
        need = engine.stats().scratch.largest_bytes
        held = engine._admission._rooms
        monkeypatch.setattr(memory, "available", lambda device: 0 if held else need)  # the first one has it all
        arrived: list[AnswerStream] = []
        waiting: list[int] = []
        forward = engine.decoder.forward

        def meanwhile(*arguments: Any, **options: Any) -> Any:
            if not arrived:
                arrived.append(engine.stream(prompt, max_new_tokens=30, plan=Plan("full")))
            waiting.append(engine.stats().waiting)
            return forward(*arguments, **options)

        monkeypatch.setattr(engine.decoder, "forward", meanwhile)
        first = engine.stream(prompt, max_new_tokens=30, plan=Plan("full"))
        answer = list(first)[-1]
        assert list(arrived[0])[-1].token_ids == answer.token_ids  # type: ignore[union-attr]
        assert set(waiting[: len(answer.token_ids)]) == {1}  # type: ignore[union-attr]


def test_a_request_that_will_never_fit_is_refused_also_while_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        prompt, longer = tiny.prompt(2, length=20), tiny.prompt(6, length=60)
        engine.prefill(prompt, Plan("full"))
        need = engine.stats().scratch.largest_bytes
        monkeypatch.setattr(memory, "available", lambda device: need // 10)
        with busy(engine._scheduler), pytest.raises(ResourceExhausted):
            engine.stream(longer, max_new_tokens=1, plan=Plan("full"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no 2 GiB"), MemoryError("no 2 GiB")])
def test_a_device_that_runs_out_of_memory_is_an_exhausted_resource(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Activations:
        """What a pass holds when it fails."""

    held: list[weakref.ref[Activations]] = []

    def fail(*_: object, **__: object) -> None:
        activations = Activations()
        held.append(weakref.ref(activations))
        raise error.with_traceback(None)

    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        prompt = tiny.prompt(2, length=20)
        with monkeypatch.context() as patch:
            patch.setattr(engine.decoder, "forward", fail)
            with pytest.raises(ResourceExhausted, match="no 2 GiB") as caught:
                engine.prefill(prompt, Plan("full"))
        error.with_traceback(None)
        assert [one() for one in held] == [None], "the error holds none of it"
        assert caught.value.__context__ is None
        engine.prefill(prompt, Plan("full"))


def test_a_comparison_takes_a_canvas_of_its_own(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        prompt = tiny.prompt(2, length=20)
        engine.prefill(prompt, Plan("full"), reserve=50)
        alone = engine.stats().scratch.largest_bytes
        engine.prefill(prompt, Plan("full"), reserve=50, compare_full=True)
        canvas = engine.stats().kv_bytes_per_token * len(prompt)
        assert engine.stats().scratch.largest_bytes == alone + canvas


def test_stats_show_the_kernels_and_the_memory_of_the_longest_prompt(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store", kernels="reference") as engine:
        stats = engine.stats()
        assert stats.kernels == "reference"
        shown = json.loads(json.dumps(stats.as_dict()["scratch"]))
        assert shown["planned_bytes"] == sum(shown["parts"].values())
        assert shown["parts"]["canvas"] == stats.kv_bytes_per_token * stats.max_positions
        assert shown["available_bytes"] == pytest.approx(memory.available(torch.device("cpu")) or 0, rel=0.5)

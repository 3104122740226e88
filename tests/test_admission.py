"""What is refused for want of memory, and what stats say of it. The rest of what is refused: ``test_engine.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blend import Plan, memory
from blend.errors import ResourceExhausted
from tests import tiny


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


def test_stats_show_the_kernels_and_the_memory_of_the_longest_prompt(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store", kernels="reference") as engine:
        stats = engine.stats()
        assert stats.kernels == "reference"
        shown = json.loads(json.dumps(stats.as_dict()["scratch"]))
        assert shown["planned_bytes"] == sum(shown["parts"].values())
        assert shown["parts"]["canvas"] == stats.kv_bytes_per_token * stats.max_positions
        assert shown["available_bytes"] == pytest.approx(memory.available(torch.device("cpu")) or 0, rel=0.5)

"""The page on sizing says what its script computes, and the script what the store and models do."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from blend.store.key import PLAIN, ObjectKey
from blend.store.layout import Header
from tests.tiny import engine, save_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")

with pytest.MonkeyPatch.context() as _patching:
    _patching.syspath_prepend(ROOT / "benchmarks")
    sizing = importlib.import_module("sizing")


def part(name: str) -> str:
    """What stands on the page between two marks."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_tables_are_those_of_the_script() -> None:
    assert part("kv") == sizing.kv_table()
    assert part("break-even") == sizing.break_even_table()


def test_the_examples_numbers_are_those_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = re.findall(r"```\n(.*?)```", part("example"), re.DOTALL)
    arguments = command.replace("\\\n", " ").split()
    assert arguments[:2] == ["python", "benchmarks/sizing.py"]
    sizing.main(arguments[2:])
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == shown.splitlines()
    found = json.loads(last)
    assert found["chunks"] * sizing.CHUNK_TOKENS >= 1
    assert found["stored_bytes"] > found["chunks"] * sizing.CHUNK_TOKENS * found["kv_token_bytes"]


def test_bytes_are_those_of_the_stores_layout() -> None:
    model = sizing.Model("any", 4, 2, 16)
    header = Header(ObjectKey("0" * 40, PLAIN), bytes(32), (1,) * 100, 4, 2, 16, "float32", bytes(16))
    assert header.payload_nbytes == 100 * model.token_nbytes("float32")
    assert header.object_nbytes == model.object_nbytes(100, "float32")
    assert model.token_nbytes() == 2 * 4 * 2 * 16 * 2


def test_a_model_that_is_here_has_the_numbers_of_its_configuration(default_model_dir: Path) -> None:
    config = AutoConfig.from_pretrained(default_model_dir)
    (listed,) = (model for model in sizing.MODELS if model.name == "SmolLM2-135M")
    assert (listed.layers, listed.kv_heads) == (config.num_hidden_layers, config.num_key_value_heads)
    assert listed.head_dim == config.hidden_size // config.num_attention_heads


def test_an_engine_stores_that_many_bytes(tmp_path: Path) -> None:
    from blend import Chunk

    with engine(save_model(tmp_path / "model"), tmp_path / "store") as made:
        made.precompute([Chunk(tuple(range(10, 60)))])
        (disk,) = (tier for tier in made.stats().tiers if tier.name == "disk")
        model = sizing.Model("tiny", 4, 2, 16)
        assert disk.used_bytes >= model.object_nbytes(50, "float32")


def test_bandwidth_at_break_even_gains_nothing() -> None:
    token, prefill, ratio = 1000, 400.0, 0.2
    bandwidth = sizing.break_even(token, prefill, ratio)
    assert token / bandwidth + ratio / prefill == pytest.approx(1 / prefill)
    assert sizing.bandwidth_for(1000, token, 1.0, 100.0, 200) is None
    assert sizing.bandwidth_for(1000, token, 3.0, 100.0, 200) == pytest.approx(1e6)

"""Every field of a fingerprint changes it, what has no effect does not, and file digests notice changes."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blend.errors import ModelNotFound
from blend.model.fingerprint import file_digest, fingerprint, read_digest, weights_digest

BASE: dict[str, Any] = {
    "config": {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}, "transformers_version": "5", "_name": "a"},
    "tokenizer": "t",
    "dtype": "float32",
    "sink": (1,),
    "layout_version": 1,
    "context": 2,
    "rope": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": np.arange(4, dtype=np.float32)}, model / "model.safetensors")
    return model


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _of(directory: Path, cache: Path, **changes: Any) -> str:
    fields = {**BASE, **changes}
    return fingerprint(directory, fields.pop("config"), cache=cache, **fields)


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**BASE["config"], "hidden_size": 9}},
        {"config": {**BASE["config"], "rope_parameters": {"rope_theta": 2e4}}},
        {"tokenizer": "u"},
        {"dtype": "bfloat16"},
        {"sink": ()},
        {"sink": (1, 2)},
        {"layout_version": 2},
        {"context": 3},
        {"rope": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"adapter": "lora"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
    ],
    ids=str,
)
def test_each_field_changes_it(directory: Path, cache: Path, change: dict[str, Any]) -> None:
    assert _of(directory, cache, **change) != _of(directory, cache)


def test_the_weights_change_it(directory: Path, cache: Path) -> None:
    before = _of(directory, cache)
    save_file({"w": np.arange(1, 5, dtype=np.float32)}, directory / "model.safetensors")
    assert _of(directory, cache) != before


def test_what_has_no_effect_does_not_change_it(directory: Path, cache: Path) -> None:
    config = OrderedDict(reversed(BASE["config"].items())) | {
        "transformers_version": "6",
        "_name": "b",
        "dtype": "float16",
        "use_cache": False,
    }
    assert _of(directory, cache, config=config) == _of(directory, cache)
    (directory / "README.md").write_text("hello")
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert _of(directory, cache) == _of(directory, cache, sink=[1])
    moved = directory.with_name("moved")
    directory.rename(moved)
    assert _of(moved, cache, config=config) == _of(moved, cache)


def test_it_is_plain_values_only(directory: Path, cache: Path) -> None:
    frequencies = {"inv_freq": np.arange(2.0)}
    assert _of(directory, cache, rope=frequencies) == _of(directory, cache, rope={"inv_freq": [0.0, 1.0]})
    assert _of(directory, cache, config={"a": {2, 1}}) == _of(directory, cache, config={"a": {1, 2}})
    with pytest.raises(TypeError, match="object"):
        _of(directory, cache, rope={"f": object()})


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="safetensors"):
        weights_digest(tmp_path)


def test_every_shard_counts(directory: Path, cache: Path) -> None:
    before = weights_digest(directory, cache)
    save_file({"v": np.zeros(1, np.float32)}, directory / "second.safetensors")
    assert weights_digest(directory, cache) != before


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file large enough for its digest to be remembered."""
    return _write(tmp_path / "large", b"abc")


def _write(file: Path, start: bytes) -> Path:
    with file.open("wb") as stream:
        stream.write(start)
        stream.truncate(16 << 20)
    return file


def test_a_digest_is_remembered_and_found_again(large: Path, cache: Path) -> None:
    assert file_digest(large, cache) == read_digest(large)
    (memo,) = (cache / "digests").iterdir()
    memo.write_text("00" * 32)
    assert file_digest(large, cache) == "00" * 32


def test_a_small_file_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"abc")
    assert file_digest(small, cache) == read_digest(small)
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["", "zz" * 32, "00" * 31])
def test_a_damaged_or_deleted_memory_is_harmless(large: Path, cache: Path, damage: str) -> None:
    digest = file_digest(large, cache)
    (memo,) = (cache / "digests").iterdir()
    memo.write_text(damage)
    assert file_digest(large, cache) == digest
    memo.unlink()
    assert file_digest(large, cache) == digest


def test_a_change_of_the_same_size_and_time_is_noticed(large: Path, cache: Path) -> None:
    before = large.stat()
    digest = file_digest(large, cache)
    _write(large, b"abd")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_digest(large, cache) != digest


def test_a_cache_that_cannot_be_written_costs_time_only(large: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the directory would be")
    assert file_digest(large, blocked) == read_digest(large)


def test_a_missing_file_is_an_os_error(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "none", cache)


def test_what_is_remembered_is_for_the_owner(large: Path, cache: Path) -> None:
    file_digest(large, cache)
    (memo,) = (cache / "digests").iterdir()
    assert stat.S_IMODE(memo.stat().st_mode) & 0o022 == 0

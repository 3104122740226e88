"""Forgetting chunks while a tier cannot tell what it has: what can go goes, and nobody is told that it was all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blend import Chunk, Engine
from blend.errors import TierUnavailable
from blend.store import DiskTier
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path) as made:
        yield made


@pytest.mark.parametrize("method", ["variants", "keys", "remove"])
def test_a_tier_that_cannot_be_asked_may_have_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    first, second, third = tiny.chunks_of(tiny.prompt())
    engine.precompute([first, second, third])
    engine.precompute([second], behind=[[first]])
    host, disk = engine.store.tiers
    monkeypatch.setattr(DiskTier, method, _fails)
    with pytest.raises(TierUnavailable, match="EIO"):
        engine.forget([first])
    assert {key.content for key in host.keys()} == {engine.content_key(c) for c in (second, third)}  # noqa: SIM118
    assert not any(key.conditioned for key in list(host.keys()))
    monkeypatch.undo()
    engine.forget([first])
    assert {str(key) for key in list(disk.keys())} == {str(key) for key in list(host.keys())}
    assert engine.missing([first, second, third]) == [first]


def test_an_object_that_cannot_be_read_may_have_been_encoded_behind_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = tiny.chunks_of(tiny.prompt())
    engine.precompute([second], behind=[[first]])
    host, disk = engine.store.tiers
    (key,) = list(host.keys())
    engine.precompute([third])  # the write before is over by then, and not remembered any more
    assert host.remove(key)
    monkeypatch.setattr(DiskTier, "get", _fails)
    with pytest.raises(TierUnavailable, match="EIO"):
        engine.forget([first])
    monkeypatch.undo()
    assert disk.contains(key)
    assert engine.forget([first]) == 1
    assert not disk.contains(key)


def test_figures_are_told_though_a_tier_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.precompute([Chunk(range(20, 40))])
    for method in ("stats", "tenants"):
        monkeypatch.setattr(DiskTier, method, _fails)
    stats = engine.stats()
    host, disk = stats.tiers
    assert (host.objects, host.down) == (1, "")
    assert "EIO" in disk.down
    assert [usage.tier for usage in stats.tenants] == ["host"]
    assert stats.as_dict()["tiers"][1]["down"] == disk.down


def _fails(*_: Any, **__: Any) -> None:
    raise TierUnavailable("disk: EIO (Input/output error)")

"""Forgetting chunks: nobody waits for it; what is on its way goes, too; a tier that cannot be asked may have more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blend import Chunk, Engine
from blend.encoding import Encoder
from blend.errors import ResourceExhausted, TierUnavailable
from blend.store import DiskTier, HostTier
from tests import tiny
from tests.server.faults import Hold


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


def test_answers_keep_coming_while_tiers_are_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = tiny.chunks_of(tiny.prompt())
    engine.precompute([first, second, third])
    hold = Hold(monkeypatch, DiskTier, "keys")
    with ThreadPoolExecutor(2) as pool:
        try:
            forgetting = pool.submit(engine.forget, [first])
            assert hold.entered.wait(60)
            answer = pool.submit(engine.generate, tiny.prompt(), max_new_tokens=4)
            assert answer.result(60).token_ids
            assert not forgetting.done()
        finally:
            hold.let_go()
        assert forgetting.result(60) == 1
    assert engine.missing([first, second, third]) == [first]


def test_a_chunk_that_is_being_encoded_goes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = tiny.chunks_of(tiny.prompt())
    hold = Hold(monkeypatch, Encoder, "encode")
    with ThreadPoolExecutor(2) as pool:
        try:
            encoding = pool.submit(engine.precompute, [second], [[first]])
            assert hold.entered.wait(60)
            forgetting = pool.submit(engine.forget, [first])
        finally:
            hold.let_go()
        assert encoding.result(60)
        assert forgetting.result(60) == 1
    assert engine.store.wait_idle(60)
    assert not list(engine.store.keys())


@pytest.mark.parametrize("staged", [False, True], ids=["in the host", "in no tier"])
@pytest.mark.parametrize("conditioned", [False, True], ids=["plain", "conditioned"])
def test_a_chunk_that_is_being_written_goes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, staged: bool, conditioned: bool
) -> None:
    first, second, _ = tiny.chunks_of(tiny.prompt())
    if staged:
        monkeypatch.setattr(HostTier, "put", _full)
    wanted, behind = ([second], [[first]]) if conditioned else ([first], None)
    hold = Hold(monkeypatch, DiskTier, "start")
    with ThreadPoolExecutor(1) as pool:
        try:
            encoding = pool.submit(engine.precompute, wanted, behind)
            assert hold.entered.wait(60)
            assert engine.forget([first]) == (not staged)
        finally:
            hold.let_go()
        assert encoding.result(60)
    assert engine.store.wait_idle(60)
    assert not list(engine.store.keys())


def _full(*_: Any) -> None:
    raise ResourceExhausted("the host is full")


def _fails(*_: Any, **__: Any) -> None:
    raise TierUnavailable("disk: EIO (Input/output error)")

"""What the router does for engines that are behind, over links that are no connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from blend_server.auth import ANYONE, OpenGate
from blend_server.router.calls import Call, NoEngine
from blend_server.router.documents import Documents
from blend_server.router.journal import Journal
from blend_server.router.owner import FIRST_SECONDS, MOST_SECONDS, Owner


class Engine:
    """A link to an engine that serves, and to whose calls ``reply`` is the answer."""

    def __init__(self, reply: Callable[[], Awaitable[bytes]]) -> None:
        self.name, self.serving, self.era = "a", True, 1
        self.current: set[str] = set()
        self.behind: dict[str, str] = {}
        self.calls = 0
        self._reply = reply

    def holds(self, owner: str) -> bool:
        return owner in self.current

    async def unary(self, *_: object) -> bytes:
        self.calls += 1
        return await self._reply()


def call(seconds: float) -> Call:
    """A call that has so many seconds left."""
    return Call("t", ANYONE, (), Mock(time_remaining=lambda: seconds))


async def read(engine: Any, path: Path, seconds: float) -> None:
    """Have a call look for engines that can be asked."""
    documents = Documents([engine], Journal(path / "journal", ["a"], 1000), OpenGate())
    try:
        await documents.readable(call(seconds))
    finally:
        await documents.close()


async def test_a_call_without_time_left_waits_for_nobody(tmp_path: Path) -> None:
    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    with pytest.raises(NoEngine):
        await asyncio.wait_for(read(Engine(never), tmp_path, 0.0), 8)


async def test_an_engine_that_makes_no_sense_is_behind_and_not_asked_again_at_once(tmp_path: Path) -> None:
    async def nonsense() -> bytes:
        return b"\xff"

    engine = Engine(nonsense)
    with pytest.raises(NoEngine, match="a: DecodeError"):
        await read(engine, tmp_path, 5.0)
    assert engine.calls == 1


def waits(owner: Owner, now: float) -> float:
    """How long from ``now`` on the owner's engine is not tried."""
    return next(seconds for seconds in range(1000) if owner.may_try("a", now + seconds))


def test_pauses_grow_while_comparisons_fail_and_shrink_when_something_changes() -> None:
    owner, now, found = Owner("t"), 0.0, []
    assert owner.may_try("a", now)
    for _ in range(9):
        owner.pause("a", now, longer=True)
        found.append(waits(owner, now))
        now += found[-1]
    assert found == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    owner.pause("a", now, longer=False)
    assert waits(owner, now) == FIRST_SECONDS
    for era, changed in ((0, True), (1, False)):
        owner = Owner("t")
        for _ in range(9):
            owner.pause("a", now, longer=True)
        assert waits(owner, now) == MOST_SECONDS
        if changed:
            owner.shorten_pauses(now)
        owner.note_era(era, now)
        assert not owner.may_try("a", now)
        assert owner.may_try("a", now + FIRST_SECONDS)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blend.store import DiskTier, HostTier, Tier, TieredStore

MakeTier = Callable[[int], Tier]


@pytest.fixture(autouse=True)
def no_thread_of_a_store_is_left() -> Iterator[None]:
    """A test closes the stores that it opens, and with them their threads end."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if name.startswith("tiered-") or name.endswith("-reader")] == []


def _make(kind: str, directory: Path, capacity: int) -> Tier:
    if kind == "host":
        return HostTier(capacity)
    disk = DiskTier(directory, capacity, fsync=False)
    if kind == "disk":
        return disk
    return TieredStore([HostTier(capacity), disk])


@pytest.fixture(params=["host", "disk", "tiered"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    """Return a maker of tiers of each kind, by their budget in bytes (of each level, where there are several)."""
    made: list[Tier] = []

    def maker(capacity: int) -> Tier:
        made.append(_make(request.param, tmp_path / str(len(made)), capacity))
        return made[-1]

    yield maker
    for tier in made:
        tier.close()


@pytest.fixture
def tier(make_tier: MakeTier) -> Tier:
    return make_tier(1 << 20)

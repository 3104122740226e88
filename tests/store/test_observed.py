"""What host and disk tiers tell of their objects: all that comes and goes, in order, whoever makes it go."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from blend.errors import Closed, ObjectCorrupt, ResourceExhausted, TierUnavailable
from blend.store import DiskTier, HostTier, ObjectKey, Tier, TieredStore, encode
from tests.store.helpers import BROKEN, OBJECT_NBYTES, FaultyIO, make, path_of, read

Told = tuple[str, ObjectKey, str, int]
Open = Callable[..., Tier]


class Listener:
    """Takes down what it is told, and what follows from it: which objects each tier holds."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.held: dict[str, dict[ObjectKey, int]] = {"host": {}, "disk": {}}
        self.out_of_order: list[Told] = []

    def on_stored(self, key: ObjectKey, tier: str, nbytes: int) -> None:
        self._take(("stored", key, tier, nbytes), key in self.held[tier])
        self.held[tier][key] = nbytes

    def on_removed(self, key: ObjectKey, tier: str) -> None:
        self._take(("removed", key, tier, 0), key not in self.held[tier])
        self.held[tier].pop(key, None)

    def _take(self, told: Told, wrong: bool) -> None:
        self.told.append(told)
        if wrong:
            self.out_of_order.append(told)

    def new(self) -> list[tuple[str, ObjectKey]]:
        """Return and forget what has been told since the last time."""
        told, self.told = self.told, []
        return [(kind, key) for kind, key, _, _ in told]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture(params=["host", "disk"])
def open_tier(request: pytest.FixtureRequest, tmp_path: Path, listener: Listener) -> Open:
    if request.param == "host":
        return partial(HostTier, observer=listener)
    return partial(DiskTier, tmp_path / "disk", fsync=False, observer=listener)


def test_put_evicted_and_removed(open_tier: Open, listener: Listener) -> None:
    tier = open_tier(2 * OBJECT_NBYTES)
    objects = [make(seed) for seed in range(3)]
    keys = [header.key for header, _ in objects]
    for header, payload in objects[:2]:
        tier.put(header, payload)
    assert listener.held[tier.name] == dict.fromkeys(keys[:2], OBJECT_NBYTES)
    assert not tier.put(*objects[0])
    assert listener.new() == [("stored", keys[0]), ("stored", keys[1])]
    tier.put(*objects[2])
    assert listener.new() == [("removed", keys[0]), ("stored", keys[2])]
    assert tier.remove(keys[1])
    assert not tier.remove(keys[1])
    assert listener.new() == [("removed", keys[1])]


def test_nothing_is_told_of_what_was_never_readable(open_tier: Open, listener: Listener) -> None:
    tier = open_tier(1 << 20)
    header, payload = make(1)
    with tier.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
    wrong = tier.start(header.key, header.object_nbytes)
    wrong.write(0, bytes(header.header_nbytes))
    wrong.write(header.header_nbytes, payload)
    with pytest.raises(ObjectCorrupt):
        wrong.commit()
    with pytest.raises(ResourceExhausted):
        tier.put(*make(2, tokens=1 << 16))
    assert listener.told == []


def test_what_is_removed_under_a_lease_is_told_at_once_and_once(open_tier: Open, listener: Listener) -> None:
    tier = open_tier(1 << 20)
    header, payload = make(1)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    tier.remove(header.key)
    assert listener.new() == [("stored", header.key), ("removed", header.key)]
    assert bytes(lease.payload()) == payload
    lease.release()
    tier.put(header, payload)
    assert listener.new() == [("stored", header.key)]


def test_memory_goes_with_its_tier_and_files_stay(tmp_path: Path, listener: Listener) -> None:
    header, payload = make(1)
    host, disk = HostTier(1 << 20, observer=listener), DiskTier(tmp_path, 1 << 20, observer=listener)
    for tier in (host, disk):
        tier.put(header, payload)
        listener.new()
        tier.close()
        tier.close()
        assert listener.new() == ([("removed", header.key)] if tier is host else [])
    DiskTier(tmp_path, 1 << 20, observer=listener).close()
    assert listener.new() == [("stored", header.key)]
    assert listener.held == {"host": {}, "disk": {header.key: OBJECT_NBYTES}}


def test_promotion_is_a_put(tmp_path: Path, listener: Listener) -> None:
    disk = DiskTier(tmp_path, 1 << 20, observer=listener)
    header, payload = make(1)
    disk.put(header, payload)
    with TieredStore([HostTier(1 << 20, observer=listener), disk]) as store:
        assert listener.held["host"] == {}
        assert read(store, header.key) == payload
        assert listener.held == {"host": {header.key: OBJECT_NBYTES}, "disk": {header.key: OBJECT_NBYTES}}
        store.remove(header.key)
        assert listener.held == {"host": {}, "disk": {}}


def test_quarantine_takes_an_object_away(tmp_path: Path, listener: Listener) -> None:
    tier = DiskTier(tmp_path, 1 << 20, observer=listener)
    header, payload = make(1)
    tier.put(header, payload)
    path = path_of(tmp_path, header)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ObjectCorrupt):
        read(tier, header.key)
    assert listener.new() == [("stored", header.key), ("removed", header.key)]


def test_what_cannot_be_removed_is_still_there(tmp_path: Path, listener: Listener) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, 2 * OBJECT_NBYTES, io=io, observer=listener)
    objects = [make(seed) for seed in range(3)]
    for header, payload in objects[:2]:
        tier.put(header, payload)
    io.faults["unlink"] = BROKEN
    with pytest.raises(TierUnavailable):
        tier.remove(objects[0][0].key)
    with pytest.raises(TierUnavailable):
        tier.put(*objects[2])
    assert listener.held["disk"].keys() == {header.key for header, _ in objects[:2]} == set(tier.keys())
    assert listener.out_of_order == []


def test_other_processes_are_told_of_when_they_are_noticed(tmp_path: Path, listener: Listener) -> None:
    one = DiskTier(tmp_path, 2 * OBJECT_NBYTES, fsync=False, observer=listener)
    other = DiskTier(tmp_path, 2 * OBJECT_NBYTES, fsync=False)
    objects = [make(seed) for seed in range(3)]
    keys = [header.key for header, _ in objects]
    other.put(*objects[0])
    assert listener.told == []
    assert one.contains(keys[0])
    assert listener.new() == [("stored", keys[0])]
    other.put(*objects[1])
    other.put(*objects[2])  # evicts the first
    assert one.get(keys[0]) is None
    assert listener.new() == [("removed", keys[0])]
    assert set(one.keys()) == set(keys[1:]) == listener.held["disk"].keys()


def test_many_threads_are_told_of_in_order(open_tier: Open, listener: Listener) -> None:
    tier = open_tier(6 * OBJECT_NBYTES)
    objects = [make(seed) for seed in range(12)]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            header, payload = rng.choice(objects)
            with suppress(ResourceExhausted):
                (tier.put(header, payload) if rng.random() < 0.7 else tier.remove(header.key))

    threads = [threading.Thread(target=work, args=(seed,), name=f"work-{seed}") for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listener.out_of_order == []
    assert listener.held[tier.name].keys() == set(tier.keys())
    assert len(listener.told) > 100
    tier.close()
    with pytest.raises(Closed):
        tier.put(*objects[0])

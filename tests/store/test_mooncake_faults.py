"""A store over a real Mooncake that stalls, dies, forgets and comes back: the other tiers answer, nothing is wrong."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from time import monotonic

import pytest

from blend.config import StoreConfig
from blend.errors import ResourceExhausted, StoreError
from blend.store import DiskTier, HostTier, TieredStore, open_store
from blend.store.mooncake import MooncakeTier, library
from tests.store.helpers import OBJECT_NBYTES, make, read
from tests.store.mooncake_server import (
    Master,
    Owner,
    Proxy,
    cluster,
    config_for,
    master,
    require_mooncake,
    wait_for,
)

__all__ = ["cluster", "master"]
pytestmark = pytest.mark.slow
_prefixes = count()
Join = Callable[..., MooncakeTier]
Lend = Callable[[int], Owner]


@pytest.fixture
def join() -> Iterator[Join]:
    """Return a maker of clients of a master, closed in the end."""
    require_mooncake()
    with ExitStack() as stack:

        def make_client(cluster: Master, **settings: object) -> MooncakeTier:
            config = config_for(cluster, **{"prefix": f"f{next(_prefixes)}", **settings})
            return stack.enter_context(MooncakeTier(config, library()))

        yield make_client


@pytest.fixture
def lend(master: Master) -> Iterator[Lend]:
    """Return a starter of owners, stopped in the end."""
    owners: list[Owner] = []

    def start(nbytes: int) -> Owner:
        owners.append(Owner(master, nbytes))
        return owners[-1]

    yield start
    for owner in owners:
        owner.stop()


def stored(store: TieredStore, seeds: range) -> None:
    """Put objects; what they are in the host of is thrown out, so that lower tiers have to serve them."""
    for seed in seeds:
        store.put(*make(seed))
        store.tiers[0].remove(make(seed)[0].key)


def test_a_stalled_link_to_the_master_is_a_miss_and_the_other_tiers_answer(
    master: Master, lend: Lend, join: Join, tmp_path: Path
) -> None:
    """Mooncake stands before the disk: what both have comes from the disk, what it alone has is a fault, then a hit."""
    lend(64 << 20)
    proxy = Proxy(master.rpc)
    try:
        remote = join(master, master=proxy.address, deadline_seconds=0.5, negative_seconds=1.0)
        host = HostTier(50 * OBJECT_NBYTES)
        store = TieredStore([host, remote, DiskTier(tmp_path, 50 * OBJECT_NBYTES, fsync=False)])
        stored(store, range(10))
        alone, data = make(50)
        remote.put(alone, data)
        proxy.stall()
        for seed in range(10):
            header, payload = make(seed)
            assert read(store, header.key) == payload
            host.remove(header.key)
        with store.load([*(make(seed)[0].key for seed in range(10)), alone.key, make(99)[0].key]) as loads:
            assert alone.key not in loads
            assert "mooncake" in loads.missed[alone.key], "a fault, and not a plain miss"
            for seed in range(10):
                assert loads[make(seed)[0].key].tier == "disk"
                assert bytes(loads[make(seed)[0].key].payload()) == make(seed)[1]
        assert store.put(*make(60))
        assert read(store, make(60)[0].key) == make(60)[1]
        assert not remote.status().up
        assert remote.status().reason
        proxy.resume()

        def again() -> bool:
            with suppress(StoreError):
                return read(store, alone.key) == data
            return False

        wait_for("the link to recover", again)
        store.check_integrity()
        store.close()
    finally:
        proxy.close()


def test_a_link_that_stalls_in_the_middle_of_a_load_fails_that_object_and_no_other(
    master: Master, lend: Lend, join: Join, tmp_path: Path
) -> None:
    owner = lend(64 << 20)
    remote = join(master, deadline_seconds=0.5, negative_seconds=1.0)
    host = HostTier(1 << 22)
    store = TieredStore([host, DiskTier(tmp_path, 1 << 22, fsync=False), remote])
    far, data = make(1, tokens=64, head_dim=64)
    near, payload = make(2)
    remote.put(far, data)
    store.tiers[1].put(near, payload)
    with store.load([far.key, near.key]) as loads:
        assert bytes(loads[far.key].layer(0)) == data[: far.layer_nbytes]
    assert store.wait_idle(30)
    host.remove(far.key)
    host.remove(near.key)
    try:
        with store.load([far.key, near.key]) as loads:
            owner.stall()
            assert set(loads) == {far.key, near.key}
            outcomes = []
            for layer in range(3):
                try:
                    view = bytes(loads[far.key].layer(layer))
                    assert view == data[layer * far.layer_nbytes : (layer + 1) * far.layer_nbytes]
                    outcomes.append("right")
                except StoreError:
                    outcomes.append("fault")
            assert outcomes == sorted(outcomes, reverse=True), "right until it stalled"
            assert bytes(loads[near.key].payload()) == payload
        assert store.wait_idle(30)
        assert host.contains(near.key)
        assert host.contains(far.key) == ("fault" not in outcomes)
    finally:
        owner.resume()

    def again() -> bool:
        with suppress(StoreError):
            return read(store, far.key) == data
        return False

    wait_for("the owner to be used again", again)
    store.check_integrity()
    store.close()


def test_the_same_keys_again_after_a_restart_are_right_or_missing(master: Master, lend: Lend, join: Join) -> None:
    """Within the master's memory of a client its codes say yes to what later vanishes: no code is believed."""
    lend(64 << 20)
    one, other = (join(master, prefix="again") for _ in range(2))
    objects = [make(seed) for seed in range(20)]
    for header, payload in objects:
        one.put(header, payload)
    for _ in range(2):
        master.kill()
        wait_for("the outage to be noticed", lambda: not one.status().up and not other.status().up)
        master.start()
        wait_for("the recovery", lambda: one.status().up and other.status().up)
        began = monotonic()
        while monotonic() - began < 3:
            for header, payload in objects:
                with suppress(StoreError, ResourceExhausted):
                    one.put(header, payload)
                for tier in (one, other):
                    with suppress(StoreError):
                        assert read(tier, header.key) in (payload, None)

    def back() -> bool:
        for header, payload in objects:
            with suppress(StoreError, ResourceExhausted):
                one.put(header, payload)
        with suppress(StoreError):
            return any(read(other, header.key) == payload for header, payload in objects)
        return False

    wait_for("the store to be used again", back)
    one.check_integrity()


def test_two_writers_of_one_key_with_other_bytes_never_mix(cluster: Master, join: Join) -> None:
    """Another generation under the same key, put, removed and put again while it is read: one or the other, whole."""
    one, other, reader = (join(cluster, prefix="mixed") for _ in range(3))
    header, payload = make(1, tokens=64, head_dim=64)
    different = bytes(len(payload))
    stop = threading.Event()
    unexpected: list[BaseException] = []

    def write(tier: MooncakeTier, data: bytes) -> None:
        while not stop.is_set():
            try:
                with suppress(StoreError, ResourceExhausted):
                    tier.put(header.sealed(data), data)
                    tier.remove(header.key)
            except BaseException as error:  # noqa: BLE001 - the test fails on it
                unexpected.append(error)
                return

    threads = [
        threading.Thread(target=write, args=(tier, data), name="writer")
        for tier, data in ((one, payload), (other, different))
    ]
    for thread in threads:
        thread.start()
    hits = 0
    try:
        end = monotonic() + 4
        while monotonic() < end:
            with suppress(StoreError):
                lease = reader.get(header.key)
                if lease is None:
                    continue
                with lease:
                    size = header.layer_nbytes
                    want = payload if lease.header == header else different
                    for layer in range(3):
                        assert bytes(lease.layer(layer)) == want[layer * size : (layer + 1) * size]
                    hits += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert unexpected == []
    assert hits > 0
    reader.check_integrity()


def test_an_owner_that_dies_under_a_store_costs_its_objects_alone(
    master: Master, lend: Lend, join: Join, tmp_path: Path
) -> None:
    owner = lend(64 << 20)
    remote = join(master, deadline_seconds=1.0)
    store = TieredStore([HostTier(50 * OBJECT_NBYTES), remote, DiskTier(tmp_path, 50 * OBJECT_NBYTES, fsync=False)])
    stored(store, range(8))
    lost, data = make(40)
    remote.put(lost, data)
    owner.kill()
    for seed in range(8):
        lease = store.lookup(make(seed)[0].key).lease
        assert lease is not None
        with lease:
            try:
                assert bytes(lease.payload()) == make(seed)[1]
            except StoreError:  # it was on its way from the owner that is gone: another look-up goes past it
                assert read(store, make(seed)[0].key) == make(seed)[1]
    with suppress(StoreError):
        assert read(store, lost.key) is None
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("way", ["load", "lookup"])
def test_a_late_transfer_writes_over_nobody_elses_bytes(master: Master, lend: Lend, way: str) -> None:
    """The host tier's memory is what the library reads into: what it writes there after its deadline hurts nobody."""
    require_mooncake()
    owner = lend(64 << 20)
    config = config_for(master, prefix=f"late {way}".replace(" ", ""), deadline_seconds=0.5, negative_seconds=1.0)
    size = make(0, tokens=256, head_dim=128)[0].object_nbytes
    store, _ = open_store(StoreConfig(host_bytes=6 * size, disk_bytes=0, mooncake=config, high_watermark=1.0))
    with store:
        host, remote = store.tiers
        assert isinstance(remote, MooncakeTier)
        wanted = [make(seed, tokens=256, head_dim=128) for seed in range(3)]
        for header, payload in wanted:
            store.put(header, payload)
            assert remote.contains(header.key)
            host.remove(header.key)
        owner.stall()
        try:
            if way == "load":
                with store.load([header.key for header, _ in wanted]) as loads:
                    for header, _ in wanted:
                        with pytest.raises((StoreError, KeyError)):
                            loads[header.key].payload()
            else:
                for header, _ in wanted:
                    lease = store.lookup(header.key).lease
                    if lease is not None:
                        with lease, pytest.raises(StoreError):
                            lease.payload()
            assert store.wait_idle(30)
            gc.collect()
            others = [make(seed, tokens=256, head_dim=128) for seed in range(100, 112)]
            for header, payload in others:
                with suppress(ResourceExhausted):  # memory that a transfer may still write to is not given out
                    host.put(header, payload)
            host.check_integrity()
        finally:
            owner.resume()
        end = monotonic() + 5
        while monotonic() < end:
            host.check_integrity()
            for header, payload in others:
                assert read(host, header.key) in (payload, None)
        assert any(host.contains(header.key) for header, _ in others)

        def again() -> bool:
            with suppress(StoreError):
                return all(read(store, header.key) == payload for header, payload in wanted)
            return False

        wait_for("the owner to be used again", again)
        gc.collect()

        def free() -> bool:
            with suppress(ResourceExhausted):
                host.start(make(200)[0].key, 5 * size).revoke()
                return True
            return False

        wait_for("the memory to be free again", free)

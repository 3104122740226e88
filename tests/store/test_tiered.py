from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from blend.config import StoreConfig
from blend.errors import InvalidConfig, InvalidInput, LeaseReleased, ObjectCorrupt, ResourceExhausted, TierUnavailable
from blend.store import DiskTier, HostTier, TieredStore, load_secret, open_store
from tests.store.helpers import BROKEN, NO_SPACE, OBJECT_NBYTES, FaultyIO, make, path_of, read

ROOM = 1 << 20


class Stack:
    """Host over disk, with system calls that can be made to fail."""

    def __init__(self, directory: Path, host_bytes: int = ROOM, disk_bytes: int = ROOM) -> None:
        self.directory = directory
        self.io = FaultyIO()
        self.host = HostTier(host_bytes)
        self.disk = DiskTier(directory, disk_bytes, fsync=False, io=self.io)
        self.store = TieredStore([self.host, self.disk])


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    made.store.close()


def on_disk_only(stack: Stack, seed: int = 1) -> None:
    stack.store.put(*make(seed))
    stack.host.remove(make(seed)[0].key)


def test_writing_goes_through_to_all_tiers(stack: Stack) -> None:
    header, payload = make(1)
    assert stack.store.put(header, payload)
    for tier in (stack.host, stack.disk):
        assert read(tier, header.key) == payload
    found = stack.store.lookup(header.key)
    assert (found.tier, found.reason, found.fault) == ("host", "", None)
    assert found.lease is not None
    assert found.lease.tier == "host"
    assert [stats.name for stats in stack.store.tier_stats()] == ["host", "disk"]
    assert stack.store.stats().objects == 1


def test_putting_again_fills_the_tier_that_lacks_it(stack: Stack) -> None:
    on_disk_only(stack)
    assert not stack.store.put(*make(1))
    assert stack.host.contains(make(1)[0].key)


@pytest.mark.parametrize("layerwise", [True, False])
def test_what_was_read_from_disk_enters_the_host(stack: Stack, layerwise: bool) -> None:
    header, payload = make(1)
    on_disk_only(stack)
    found = stack.store.lookup(header.key)
    assert found.tier == "disk"
    assert found.lease is not None
    with found.lease as lease:
        assert not stack.host.contains(header.key)
        if layerwise:
            parts = {layer: bytes(lease.layer(layer)) for layer in (1, 1, 2, 0)}
            assert b"".join(parts[layer] for layer in range(3)) == payload
        else:
            assert bytes(lease.payload()) == payload
        assert read(stack.host, header.key) == payload
    assert stack.store.lookup(header.key).tier == "host"
    stack.store.check_integrity()


def test_half_an_object_is_not_promoted(stack: Stack) -> None:
    header, payload = make(1)
    on_disk_only(stack)
    with stack.store.lookup(header.key).lease as lease:  # type: ignore[union-attr]
        lease.layer(0)
        lease.layer(1)
    assert not stack.host.contains(header.key)
    assert stack.host.stats().used_bytes == 0
    assert read(stack.store, header.key) == payload
    assert stack.host.contains(header.key)


def test_promotion_needs_room_but_reading_does_not(tmp_path: Path) -> None:
    stack = Stack(tmp_path, host_bytes=OBJECT_NBYTES)
    on_disk_only(stack)
    stack.store.put(*make(2))
    with stack.host.get(make(2)[0].key) as lease:  # type: ignore[union-attr]
        lease.payload()
        assert read(stack.store, make(1)[0].key) == make(1)[1]
        assert not stack.host.contains(make(1)[0].key)
    assert stack.store.stats().failures == 0
    assert read(stack.store, make(1)[0].key) == make(1)[1]
    assert stack.host.contains(make(1)[0].key)


def test_a_removed_object_is_not_promoted_by_who_still_reads_it(stack: Stack) -> None:
    header, payload = make(1)
    on_disk_only(stack)
    with stack.store.lookup(header.key).lease as lease:  # type: ignore[union-attr]
        lease.layer(0)
        assert stack.store.remove(header.key)
        assert bytes(lease.payload()) == payload
    assert stack.store.lookup(header.key).lease is None
    assert not stack.host.contains(header.key)
    assert not stack.disk.contains(header.key)


def test_one_of_many_readers_promotes(stack: Stack) -> None:
    header, payload = make(1)
    on_disk_only(stack)
    leases = [stack.store.lookup(header.key).lease for _ in range(3)]
    assert all(bytes(lease.payload()) == payload for lease in reversed(leases) if lease is not None)
    assert stack.host.contains(header.key)
    assert stack.host.stats().objects == 1
    stack.store.check_integrity()


def test_a_failing_disk_costs_no_host_copy(stack: Stack) -> None:
    header, payload = make(1)
    stack.io.faults = {"pwrite": NO_SPACE}
    assert stack.store.put(header, payload)
    assert read(stack.store, header.key) == payload
    assert not stack.disk.contains(header.key)
    assert stack.store.stats().failures == 1
    stack.io.faults = {}
    assert not stack.store.put(header, payload)  # later it is made durable after all
    assert stack.disk.contains(header.key)
    stack.store.check_integrity()


def test_a_full_host_costs_no_disk_copy(tmp_path: Path) -> None:
    stack = Stack(tmp_path, host_bytes=OBJECT_NBYTES - 1)
    header, payload = make(1)
    assert stack.store.put(header, payload)
    found = stack.store.lookup(header.key)
    assert found.tier == "disk"
    assert read(stack.store, header.key) == payload


def test_a_put_that_no_tier_takes_raises(tmp_path: Path) -> None:
    stack = Stack(tmp_path, host_bytes=OBJECT_NBYTES - 1)
    stack.io.faults = {"pwrite": BROKEN}
    with pytest.raises(TierUnavailable, match="EIO"):
        stack.store.put(*make(1))
    stack.io.faults = {"create": BROKEN}
    with pytest.raises(TierUnavailable, match="EIO"):
        stack.store.put(*make(1))
    stack = Stack(tmp_path / "small", OBJECT_NBYTES - 1, OBJECT_NBYTES - 1)
    with pytest.raises(ResourceExhausted, match="larger"):
        stack.store.put(*make(1))
    assert stack.store.stats().used_bytes == 0


def test_wrong_bytes_enter_no_tier(stack: Stack) -> None:
    header, payload = make(1)
    with pytest.raises(ObjectCorrupt):
        stack.store.put(header, payload[::-1])
    assert not stack.disk.contains(header.key)
    assert stack.store.stats().used_bytes == 0
    assert stack.store.put(header, payload)


def test_a_fault_is_told_apart_from_a_miss(stack: Stack) -> None:
    header, _ = make(1)
    missed = stack.store.lookup(header.key)
    assert (missed.lease, missed.tier, missed.reason, missed.fault) == (None, None, "", None)
    on_disk_only(stack)
    stack.io.faults = {"open": BROKEN}
    failed = stack.store.lookup(header.key)
    assert (failed.lease, failed.tier) == (None, None)
    assert "disk" in failed.reason
    assert "EIO" in failed.reason
    with pytest.raises(TierUnavailable):
        stack.store.get(header.key)
    stats = stack.store.stats()
    assert (stats.hits, stats.misses, stats.failures) == (0, 1, 2)


def test_lower_tiers_are_asked_past_a_fault(tmp_path: Path) -> None:
    header, payload = make(1)
    near = Stack(tmp_path / "near").disk
    near.name = "near"
    far = DiskTier(tmp_path / "far", ROOM, name="far", fsync=False)
    store = TieredStore([near, far])
    store.put(header, payload)
    path_of(tmp_path / "near", header).write_bytes(b"damaged")
    found = store.lookup(header.key)
    assert found.tier == "far"
    assert found.reason
    assert isinstance(found.fault, ObjectCorrupt)
    assert found.lease is not None
    with found.lease as lease:
        assert bytes(lease.payload()) == payload
    assert store.lookup(header.key).tier == "near"  # healed by the promotion
    assert store.stats().quarantined == 1


def test_a_fault_while_reading_is_counted_and_not_promoted(stack: Stack) -> None:
    header, _ = make(1)
    on_disk_only(stack)
    raw = bytearray(path_of(stack.directory, header).read_bytes())
    raw[-1] ^= 1
    path_of(stack.directory, header).write_bytes(raw)
    with stack.store.lookup(header.key).lease as lease:  # type: ignore[union-attr]
        lease.layer(0)
        with pytest.raises(ObjectCorrupt, match="layer 2"):
            lease.layer(2)
        lease.layer(1)
    assert stack.store.lookup(header.key).lease is None
    assert stack.store.stats().failures == 1
    assert not stack.host.contains(header.key)


def test_a_fault_while_promoting_is_the_readers_fault(stack: Stack) -> None:
    header, payload = make(1)
    on_disk_only(stack)
    with stack.store.lookup(header.key).lease as lease:  # type: ignore[union-attr]
        stack.io.faults = {"pread": BROKEN}
        with pytest.raises(TierUnavailable, match="EIO"):
            lease.payload()
        assert stack.host.stats().used_bytes == 0
        stack.io.faults = {}
        assert bytes(lease.payload()) == payload
        assert bytes(lease.payload()) == payload
        lease.release()
        with pytest.raises(LeaseReleased):
            lease.payload()
    assert stack.store.stats().failures == 1
    assert stack.host.contains(header.key)


def test_removal_reaches_every_tier_and_tells_of_faults(stack: Stack) -> None:
    header, payload = make(1)
    stack.store.put(header, payload)
    stack.io.faults = {"unlink": BROKEN}
    with pytest.raises(TierUnavailable):
        stack.store.remove(header.key)
    assert not stack.host.contains(header.key)
    assert read(stack.store, header.key) == payload
    stack.io.faults = {}
    assert stack.store.remove(header.key)
    assert not stack.store.remove(header.key)
    gc.collect()
    assert stack.store.stats().used_bytes == 0


def test_resolving_a_variant(stack: Stack) -> None:
    plain, conditioned = make(1), make(1, neighbours=["8" * 40])
    content = plain[0].key.content
    assert stack.store.resolve(content, "best") is None
    stack.store.put(*plain)
    assert stack.store.resolve(content, "best") == plain[0].key
    assert stack.store.resolve(content, "conditioned") is None
    stack.store.put(*conditioned)
    stack.host.remove(conditioned[0].key)
    assert stack.store.resolve(content, "best") == conditioned[0].key
    assert stack.store.resolve(content, "conditioned") == conditioned[0].key
    assert stack.store.resolve(content, "plain") == plain[0].key
    with pytest.raises(InvalidInput, match="variant"):
        stack.store.resolve(content, "other")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="content"):
        stack.store.resolve("x", "plain")


def test_a_tier_of_tiers_is_a_tier(tmp_path: Path) -> None:
    inner = Stack(tmp_path).store
    store = TieredStore([HostTier(ROOM), inner])
    header, payload = make(1)
    store.put(header, payload)
    assert all(tier.contains(header.key) for tier in (*store.tiers, *inner.tiers))
    store.tiers[0].remove(header.key)
    inner.tiers[0].remove(header.key)
    found = store.lookup(header.key)
    assert found.tier == "tiered"
    assert found.lease is not None
    assert bytes(found.lease.payload()) == payload
    assert all(tier.contains(header.key) for tier in (*store.tiers, *inner.tiers))
    store.check_integrity()


def test_no_tiers_is_always_a_miss() -> None:
    store = TieredStore([])
    assert store.lookup(make(1)[0].key).lease is None
    assert not store.remove(make(1)[0].key)
    with pytest.raises(ResourceExhausted, match="no tier"):
        store.put(*make(1))


def test_names_of_tiers_differ() -> None:
    with pytest.raises(InvalidConfig, match="tiers"):
        TieredStore([HostTier(ROOM), HostTier(ROOM)])


def test_a_store_from_settings(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    store, secret = open_store(StoreConfig(directory=directory))
    assert [tier.name for tier in store.tiers] == ["host", "disk"]
    assert secret == load_secret(directory)
    assert store.put(*make(1))
    store.close()
    store, _ = open_store(StoreConfig(host_bytes=0, directory=directory, secret=b"x" * 16))
    assert [tier.name for tier in store.tiers] == ["disk"]
    assert read(store, make(1)[0].key) == make(1)[1]
    store.close()
    store, secret = open_store(StoreConfig(disk_bytes=0, directory=tmp_path / "unused"))
    assert [tier.name for tier in store.tiers] == ["host"]
    assert len(secret) == 32
    assert not (tmp_path / "unused").exists()
    assert open_store(StoreConfig(disk_bytes=0, secret=b"y" * 16))[1] == b"y" * 16

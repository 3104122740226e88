"""What ends in the middle: leases that expire while bytes are read, and stores that close during loads."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blend.errors import Closed, LeaseReleased, ResourceExhausted, StoreError
from blend.store import DiskTier, HostTier, Policy, Terms, TieredStore
from tests.store.helpers import OBJECT_NBYTES, FaultyIO, make, path_of, read


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class MeddlingIO(FaultyIO):
    """System calls; in the middle of reading a payload, something happens."""

    meddle: Callable[[], None] | None = None

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        if offset < 4096 or self.meddle is None:
            return super().pread(fd, into, offset)
        meddle, self.meddle = self.meddle, None
        half = max(len(into) // 2, 1)
        got = super().pread(fd, into[:half], offset)
        meddle()
        return got


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("promoting", [True, False])
def test_a_lease_that_expires_while_its_bytes_are_read(tmp_path: Path, layerwise: bool, promoting: bool) -> None:
    """Others evict, the object is removed and its name taken, all within one read: right bytes, or an error."""
    clock = Clock()
    terms = Terms(lease_seconds=10, clock=clock)
    io = MeddlingIO()
    disk = DiskTier(tmp_path, 2 * OBJECT_NBYTES, fsync=False, io=io, terms=terms)
    store = TieredStore([HostTier(1 << 20, terms=terms), disk] if promoting else [disk])
    header, payload = make(1)
    disk.put(header, payload)
    lease = store.get(header.key)
    assert lease is not None
    replaced = bytes(len(payload))

    def expire_and_replace() -> None:
        clock.now += 100
        for seed in range(2, 6):  # all the room that there is, over and over
            assert disk.put(*make(seed))
        assert disk.remove(header.key)
        assert disk.put(header.sealed(replaced), replaced)

    io.meddle = expire_and_replace
    got: list[bytes] = []
    try:
        if layerwise:
            got.append(bytes(lease.layer(1)))
            assert got[0] == payload[header.layer_nbytes : 2 * header.layer_nbytes]
        else:
            got.append(bytes(lease.payload()))
            assert got[0] == payload
    except LeaseReleased:
        assert not got
    assert io.meddle is None, "it happened"
    if promoting and not layerwise:  # from here on the lease is on the copy that it has just made
        assert bytes(lease.layer(0)) == payload[: header.layer_nbytes]
        clock.now += 10
    with pytest.raises(LeaseReleased, match="expired after 10"):
        lease.layer(0)
    found = read(store, header.key)
    assert found == replaced or (promoting and found == payload)
    assert disk.stats().failures == 0
    store.check_integrity()


def test_a_lease_that_expires_between_two_layers_is_refused_and_the_next_one_reads(tmp_path: Path) -> None:
    clock = Clock()
    terms = Terms(lease_seconds=10, clock=clock)
    store = TieredStore([HostTier(1 << 20, terms=terms), DiskTier(tmp_path, 1 << 20, fsync=False, terms=terms)])
    header, payload = make(1)
    store.put(header, payload)
    for tier in ("host", "disk"):
        if tier == "disk":
            store.tiers[0].remove(header.key)
        lease = store.get(header.key)
        assert lease is not None
        assert lease.tier == tier
        lease.layer(0)
        clock.now += 10
        with pytest.raises(LeaseReleased):
            lease.layer(1)
        with pytest.raises(LeaseReleased):
            lease.renew()
        again = store.get(header.key)
        assert again is not None
        with again:
            assert bytes(again.payload()) == payload
    assert store.stats().failures == 0


def test_readers_of_expiring_leases_never_read_another_objects_bytes(tmp_path: Path) -> None:
    """Four readers whose leases run out all the time, while others evict what they read."""
    terms = Terms(lease_seconds=0.002)
    store = TieredStore(
        [HostTier(4 * OBJECT_NBYTES, terms=terms), DiskTier(tmp_path, 6 * OBJECT_NBYTES, fsync=False, terms=terms)]
    )
    objects = [make(seed) for seed in range(12)]
    wrong: list[int] = []
    expired = threading.Semaphore(0)
    stop = threading.Event()

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            header, payload = rng.choice(objects)
            lease = store.lookup(header.key).lease
            if lease is None:
                continue
            kept: list[tuple[memoryview, bytes]] = []
            try:
                for layer in range(3):
                    size = header.layer_nbytes
                    kept.append((lease.layer(layer), payload[layer * size : (layer + 1) * size]))
                    time.sleep(0.001)
            except LeaseReleased:
                expired.release()
            except StoreError:
                wrong.append(-1)
            wrong.extend(1 for view, data in kept if bytes(view) != data)
            kept.clear()

    readers = [threading.Thread(target=reader, args=(seed,), name=f"reader {seed}") for seed in range(4)]
    for thread in readers:
        thread.start()
    rng = random.Random(9)
    try:
        for _ in range(600):
            try:
                store.put(*rng.choice(objects))
            except ResourceExhausted:
                continue
            if rng.random() < 0.2:
                store.remove(rng.choice(objects)[0].key)
    finally:
        stop.set()
        for thread in readers:
            thread.join()
    assert wrong == []
    assert expired.acquire(blocking=False), "no lease ran out while it was read"
    gc.collect()
    store.check_integrity()
    store.close()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_closing_during_loads_at_any_moment(tmp_path: Path) -> None:
    """Every reader gets right bytes or an error that says why, at once; nothing is left open and nothing is lost."""
    objects = [make(seed) for seed in range(12)]
    with DiskTier(tmp_path, 1 << 20, fsync=False) as disk:
        for header, payload in objects:
            disk.put(header, payload)
    rng = random.Random(1)
    outcomes = {"right": 0, "ended": 0}
    before, others = descriptors(), set(threading.enumerate())
    for _ in range(40):
        store = TieredStore(
            [HostTier(6 * OBJECT_NBYTES), DiskTier(tmp_path, 1 << 20, fsync=False)],
            policy=Policy(inflight_bytes=5 * make(0)[0].payload_nbytes),
        )
        _close_under_readers(store, objects, rng.uniform(0, 0.01), outcomes)
        del store
    assert outcomes["right"] > 0
    assert outcomes["ended"] > 0
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("tiered-")]
    assert descriptors() <= before
    with DiskTier(tmp_path, 1 << 20, fsync=False) as disk:
        assert all(read(disk, header.key) == payload for header, payload in objects)
        assert all(path_of(tmp_path, header).exists() for header, _ in objects)
        assert disk.stats().failures == disk.stats().quarantined == 0
        disk.check_integrity()


def _close_under_readers(
    store: TieredStore,
    objects: list,
    seconds: float,
    outcomes: dict[str, int],  # type: ignore[type-arg]
) -> None:
    wrong: list[object] = []
    lock = threading.Lock()

    def reader(part: int) -> None:
        rng = random.Random(part)
        while True:
            wanted = rng.sample(objects, 5)
            try:
                with store.load([header.key for header, _ in wanted]) as loads:
                    for header, payload in wanted:
                        if bytes(loads[header.key].payload()) != payload:
                            wrong.append(header.key)
                with lock:
                    outcomes["right"] += 1
            except Closed:
                with lock:
                    outcomes["ended"] += 1
                return
            except BaseException as error:  # noqa: BLE001 - the test fails on it
                wrong.append(error)
                return

    threads = [threading.Thread(target=reader, args=(part,), name=f"reader {part}") for part in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    store.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []


def test_closing_during_puts_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(2)
    durable: set[int] = set()
    for number in range(15):
        store = TieredStore([HostTier(6 * OBJECT_NBYTES), DiskTier(tmp_path, 1 << 24, fsync=False)])
        done = _close_under_writers(store, number, rng.uniform(0, 0.02))
        assert done or number
        durable |= done
    assert len(durable) > 15
    with DiskTier(tmp_path, 1 << 24, fsync=False) as disk:
        assert all(read(disk, make(seed)[0].key) == make(seed)[1] for seed in durable)
        assert not list(tmp_path.rglob("*.tmp"))
        disk.check_integrity()


def _close_under_writers(store: TieredStore, number: int, seconds: float) -> set[int]:
    acknowledged: list[int] = []
    unexpected: list[BaseException] = []

    def writer(part: int) -> None:
        seed = 1000 * number + 100_000 * part
        while True:
            try:
                if part == 0:
                    store.put(*make(seed))
                    acknowledged.append(seed)
                elif store.put_async(*make(seed)).durable.result(30):
                    acknowledged.append(seed)
            except Closed:
                return
            except StoreError as error:
                unexpected.append(error)
                return
            except ResourceExhausted:
                continue
            seed += 1

    threads = [threading.Thread(target=writer, args=(part,), name=f"writer {part}") for part in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    store.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert unexpected == []
    return set(acknowledged)


def test_a_load_on_a_store_that_closes_is_told_so(tmp_path: Path) -> None:
    store = TieredStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20, fsync=False)])
    store.tiers[1].put(*make(1))
    store._loader.close()  # what close() does first; the load below is between that and the tiers' end
    with store.load([make(1)[0].key]) as loads, pytest.raises(Closed):
        loads[make(1)[0].key].payload()

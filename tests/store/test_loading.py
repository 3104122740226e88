"""Loads: layer by layer, all first layers first, within a budget, and what becomes of them under faults."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from blend.errors import Closed, InvalidInput, LeaseReleased, ObjectCorrupt, TierUnavailable
from blend.store import DiskTier, Header, HostTier, Policy, Terms, TieredStore
from blend.store.loadlease import LoadingLease
from tests.store.helpers import BROKEN, OBJECT_NBYTES, FaultyIO, make, path_of, read


class SteppedIO(FaultyIO):
    """System calls of which reads of payloads are noted, and wait to be let go, so many at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int]] = []
        self.steps = threading.Semaphore(10_000)

    def hold(self) -> None:
        self.steps = threading.Semaphore(0)

    def go(self, reads: int = 10_000) -> None:
        self.steps.release(reads)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        if offset >= 4096:
            assert self.steps.acquire(timeout=30)
            self.reads.append((fd, offset))
        return super().pread(fd, into, offset)


class Stack:
    def __init__(self, directory: Path, objects: int = 50, terms: Terms | None = None, **policy: object) -> None:
        self.io = SteppedIO()
        self.directory = directory
        self.host = HostTier(objects * OBJECT_NBYTES)
        self.disk = DiskTier(directory, 1 << 24, fsync=False, io=self.io, terms=terms or Terms())
        self.store = TieredStore([self.host, self.disk], policy=Policy(**policy))  # type: ignore[arg-type]


@pytest.fixture
def stacks(tmp_path: Path) -> Iterator[list[Stack]]:
    made: list[Stack] = []
    yield made
    for stack in made:
        stack.io.go()
        stack.store.close()


@pytest.fixture
def stack(tmp_path: Path, stacks: list[Stack]) -> Stack:
    stacks.append(Stack(tmp_path))
    return stacks[0]


def keys_of(*seeds: int) -> list:  # type: ignore[type-arg]
    return [make(seed)[0].key for seed in seeds]


def layer_of(seed: int, layer: int) -> bytes:
    header, payload = make(seed)
    return payload[layer * header.layer_nbytes : (layer + 1) * header.layer_nbytes]


def on_disk(stack: Stack, *seeds: int) -> None:
    for seed in seeds:
        stack.disk.put(*make(seed))
    stack.io.reads.clear()


def test_layers_come_in_order_over_all_objects(stack: Stack) -> None:
    on_disk(stack, 1, 2, 3)
    with stack.store.load(keys_of(1, 2, 3)) as loads:
        assert list(loads) == keys_of(1, 2, 3)
        for seed in (1, 2, 3):
            assert bytes(loads[make(seed)[0].key].payload()) == make(seed)[1]
        assert stack.store.wait_idle(30)
        header = make(1)[0]
        assert [offset for _, offset in stack.io.reads] == [
            header.layer_range(layer)[0] for layer in range(3) for _ in range(3)
        ]
        fds = [fd for fd, _ in stack.io.reads]
        assert fds == fds[:3] * 3
        assert len(set(fds)) == 3


def test_a_layer_is_there_before_the_next_one_is_read(stack: Stack) -> None:
    on_disk(stack, 1, 2)
    stack.io.hold()
    with stack.store.load(keys_of(1, 2)) as loads:
        one, two = (loads[key] for key in keys_of(1, 2))
        stack.io.go(1)
        assert bytes(one.layer(0)) == layer_of(1, 0)
        stack.io.go(1)
        assert bytes(two.layer(0)) == layer_of(2, 0)
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(lambda: bytes(one.layer(2)))
            assert not later.done()
            assert stack.io.reads[-1][1] == make(1)[0].layer_range(0)[0]
            stack.io.go(3)
            assert later.result(30) == layer_of(1, 2)
        assert bytes(one.layer(1)) == layer_of(1, 1)
        room = np.zeros(make(1)[0].layer_nbytes, np.uint8)
        assert one.layer(0, into=room.data).readonly
        assert room.tobytes() == layer_of(1, 0)
        with pytest.raises(InvalidInput, match="into"):
            one.layer(0, into=memoryview(b"x"))
        with pytest.raises(InvalidInput, match="layer"):
            one.layer(3)
        stack.io.go(1)
        assert bytes(two.payload()) == make(2)[1]


def test_what_was_loaded_is_in_the_host_without_another_copy(stack: Stack) -> None:
    on_disk(stack, 1)
    with stack.store.load(keys_of(1)) as loads:
        lease = loads[keys_of(1)[0]]
        assert lease.tier == "disk"
        view = lease.payload()
        assert stack.store.wait_idle(30)
        held = stack.host.get(keys_of(1)[0])
        assert held is not None
        assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(held.payload(), np.uint8))
        held.release()
    with stack.store.load(keys_of(1)) as loads:
        assert loads[keys_of(1)[0]].tier == "host"
        assert not isinstance(loads[keys_of(1)[0]], LoadingLease)
    assert stack.store.load_stats().loaded == 1
    stack.store.check_integrity()


def test_what_is_not_stored_is_told_apart_from_what_failed(stack: Stack) -> None:
    on_disk(stack, 1, 2)
    path_of(stack.directory, make(2)[0]).write_bytes(b"damaged")
    with stack.store.load(keys_of(1, 2, 3, 1)) as loads:
        assert len(loads) == 1
        assert set(loads.missed) == set(keys_of(2, 3))
        assert loads.missed[keys_of(3)[0]] == ""
        assert "disk" in loads.missed[keys_of(2)[0]]
    with stack.store.load([]) as loads:
        assert not loads


def test_a_fault_in_one_object_costs_no_other(stack: Stack) -> None:
    read_with_a_fault(stack)
    gc.collect()
    assert stack.host.stats().used_bytes == OBJECT_NBYTES
    stack.store.check_integrity()


def read_with_a_fault(stack: Stack) -> None:
    on_disk(stack, 1, 2)
    path = path_of(stack.directory, make(1)[0])
    raw = bytearray(path.read_bytes())
    raw[make(1)[0].layer_range(1)[0]] ^= 1
    path.write_bytes(raw)
    with stack.store.load(keys_of(1, 2)) as loads:
        one, two = (loads[key] for key in keys_of(1, 2))
        early = one.layer(0)
        for use in (lambda: one.layer(1), lambda: one.layer(2), one.payload):
            with pytest.raises(ObjectCorrupt, match="layer 1"):
                use()
        assert bytes(early) == bytes(one.layer(0)) == layer_of(1, 0)
        assert bytes(two.payload()) == make(2)[1]
        assert stack.store.wait_idle(30)
    stats = stack.store.load_stats()
    assert (stats.loaded, stats.failed, stats.inflight_bytes) == (1, 1, 0)
    assert stack.store.stats().failures == 1
    assert not stack.host.contains(keys_of(1)[0])
    assert stack.host.contains(keys_of(2)[0])


def test_a_failing_disk_fails_what_waits(stack: Stack) -> None:
    on_disk(stack, 1)
    stack.io.hold()
    with stack.store.load(keys_of(1)) as loads:
        stack.io.faults, stack.io.after = {"pread": BROKEN}, 0
        stack.io.go()
        with pytest.raises(TierUnavailable, match="EIO"):
            loads[keys_of(1)[0]].payload()
    stack.io.faults = {}
    assert read(stack.store, keys_of(1)[0]) == make(1)[1]


def test_bytes_in_flight_are_never_more_than_allowed(tmp_path: Path, stacks: list[Stack]) -> None:
    size = make(0)[0].payload_nbytes
    stack = Stack(tmp_path, inflight_bytes=2 * size)
    stacks.append(stack)
    on_disk(stack, *range(7))
    big, payload = make(99, tokens=200)
    stack.disk.put(big, payload)
    with stack.store.load([*keys_of(*range(7)), big.key]) as loads:
        for seed in range(7):
            assert bytes(loads[keys_of(seed)[0]].payload()) == make(seed)[1]
        with pytest.raises(Exception, match="in flight"):
            loads[big.key].layer(0)
        assert big.key in loads.settle()
    assert stack.store.wait_idle(30)
    stats = stack.store.load_stats()
    assert stats.inflight_peak_bytes == 2 * size
    assert (stats.inflight_bytes, stats.loaded, stats.failed) == (0, 7, 1)


def test_loading_needs_no_room_in_the_host(tmp_path: Path, stacks: list[Stack]) -> None:
    stack = Stack(tmp_path, objects=1)
    stacks.append(stack)
    on_disk(stack, 1, 2, 3)
    with stack.store.load(keys_of(1, 2, 3)) as loads:
        assert all(bytes(loads[key].payload()) == make(seed)[1] for seed, key in zip((1, 2, 3), loads, strict=True))
    assert stack.store.stats().failures == 0


def test_leaving_early_stops_reading_and_keeps_views(stack: Stack) -> None:
    on_disk(stack, 1, 2)
    stack.io.hold()
    with stack.store.load(keys_of(1, 2)) as loads:
        lease = loads[keys_of(1)[0]]
        stack.io.go(1)
        view = lease.layer(0)
    stack.io.go(1)  # the read that is under way
    assert stack.store.wait_idle(30)
    assert len(stack.io.reads) <= 2
    for use in (lease.payload, lambda: lease.layer(0)):
        with pytest.raises(LeaseReleased):
            use()
    assert not stack.host.contains(keys_of(1)[0])
    stack.io.go()
    for seed in range(10, 70):
        stack.store.put(*make(seed))
    assert bytes(view) == layer_of(1, 0)
    del view
    gc.collect()
    stack.store.check_integrity()


def test_closing_the_store_fails_what_is_being_loaded(stack: Stack) -> None:
    others = set(threading.enumerate())
    on_disk(stack, 1, 2)
    stack.io.hold()
    loads = stack.store.load(keys_of(1, 2))
    other = stack.store.load(keys_of(2))
    threading.Timer(0.05, stack.io.go).start()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(loads[keys_of(1)[0]].payload), pool.submit(other[keys_of(2)[0]].payload)]
        stack.store.close()
        for future in waiting:
            with pytest.raises(Closed):
                future.result(30)
    loads.close()
    other.close()
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("tiered-")]
    with pytest.raises(Closed):
        stack.store.load(keys_of(1))


def test_a_removed_object_is_read_on_and_not_promoted(stack: Stack) -> None:
    on_disk(stack, 1)
    stack.io.hold()
    with stack.store.load(keys_of(1)) as loads:
        stack.io.go(1)
        loads[keys_of(1)[0]].layer(0)
        assert stack.store.remove(keys_of(1)[0])
        stack.io.go()
        assert bytes(loads[keys_of(1)[0]].payload()) == make(1)[1]
        assert stack.store.wait_idle(30)
    assert not stack.store.contains(keys_of(1)[0])
    stack.store.check_integrity()


def test_a_lease_that_expires_in_the_middle_is_a_fault_of_that_object(tmp_path: Path, stacks: list[Stack]) -> None:
    now = [0.0]
    stack = Stack(tmp_path, terms=Terms(lease_seconds=10, clock=lambda: now[0]))
    stacks.append(stack)
    on_disk(stack, 1)
    stack.io.hold()
    with stack.store.load(keys_of(1)) as loads:
        stack.io.go(1)
        loads[keys_of(1)[0]].layer(0)
        now[0] = 11.0
        stack.io.go()
        with pytest.raises(LeaseReleased, match="expired"):
            loads[keys_of(1)[0]].payload()
    assert stack.store.stats().failures == 0
    assert stack.store.wait_idle(30)
    assert stack.store.load_stats().expired == 1


def test_what_two_loads_want_is_read_once(stack: Stack) -> None:
    on_disk(stack, 1)
    stack.io.hold()
    with stack.store.load(keys_of(1)) as one, stack.store.load(keys_of(1)) as two:
        stack.io.go()
        for loads in (one, two):
            assert bytes(loads[keys_of(1)[0]].payload()) == make(1)[1]
        assert stack.store.wait_idle(30)
        assert len(stack.io.reads) == 3
        assert two[keys_of(1)[0]].tier == "host"
    assert stack.store.load_stats().joined == 1


# ------------------------------------------------------------ prefetch policies


def test_best_effort_takes_what_is_there(tmp_path: Path, stacks: list[Stack]) -> None:
    stack = Stack(tmp_path, prefetch="best_effort")
    stacks.append(stack)
    on_disk(stack, 1, 2)
    stack.host.put(*make(3))
    stack.io.hold()
    with stack.store.load(keys_of(1, 2, 3)) as loads:
        assert set(loads.settle()) == set(keys_of(1, 2)) == set(loads.missed)
        assert list(loads) == keys_of(3)
        stack.io.go()
    assert stack.store.load_stats().dropped == stack.store.load_stats().late == 2


def test_wait_complete_takes_everything(tmp_path: Path, stacks: list[Stack]) -> None:
    stack = Stack(tmp_path, prefetch="wait_complete")
    stacks.append(stack)
    on_disk(stack, 1, 2)
    stack.io.hold()
    threading.Timer(0.05, stack.io.go).start()
    with stack.store.load(keys_of(1, 2)) as loads:
        assert loads.settle() == {}
        assert all(loads[key].complete for key in loads)  # type: ignore[attr-defined]


def test_timeout_takes_what_is_there_in_time(tmp_path: Path, stacks: list[Stack]) -> None:
    stack = Stack(tmp_path, prefetch="timeout", prefetch_base=0.05, prefetch_per_ki_token=0.0, inflight_bytes=480)
    stacks.append(stack)
    on_disk(stack, 1, 2)
    stack.io.hold()
    stack.io.go(3)  # the first object, and no more
    with stack.store.load(keys_of(1, 2)) as loads:
        first, second = (loads[key] for key in keys_of(1, 2))
        assert bytes(first.payload()) == make(1)[1]
        with pytest.raises(TierUnavailable, match="in time"):
            second.layer(0)
        assert list(loads.settle()) == keys_of(2)
        assert list(loads) == keys_of(1)
        stack.io.go()
    long = Stack(tmp_path / "long", prefetch="timeout", prefetch_base=0.0, prefetch_per_ki_token=60.0)
    stacks.append(long)
    on_disk(long, 1)
    with long.store.load(keys_of(1), tokens=1024) as loads:
        assert loads.settle() == {}


def test_many_requests_at_once_get_the_right_bytes(tmp_path: Path, stacks: list[Stack]) -> None:
    stack = Stack(tmp_path, objects=6, inflight_bytes=4 * make(0)[0].payload_nbytes)
    stacks.append(stack)
    objects: list[tuple[Header, bytes]] = [make(seed) for seed in range(20)]
    on_disk(stack, *range(20))

    def request(number: int) -> int:
        wanted = [objects[(number * 7 + step * 3) % 20] for step in range(5)]
        wrong = 0
        with stack.store.load([header.key for header, _ in wanted]) as loads:
            for layer in range(3):
                for header, payload in wanted:
                    size = header.layer_nbytes
                    wrong += bytes(loads[header.key].layer(layer)) != payload[layer * size : (layer + 1) * size]
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(request, range(60))) == 0
    assert stack.store.wait_idle(30)
    assert stack.store.load_stats().inflight_bytes == 0
    gc.collect()
    stack.store.check_integrity()


def test_what_only_claims_its_key_is_neither_read_nor_promoted(stack: Stack) -> None:
    on_disk(stack, 1, 2)
    one, two = keys_of(1, 2)
    with stack.store.load([one, two], wrong=lambda header: "not it" if header.key == one else "") as loads:
        assert list(loads) == [two]
        assert loads.missed == {one: "disk: not it"}
        assert bytes(loads[two].payload()) == make(2)[1]
    assert stack.store.wait_idle(30)
    assert {fd for fd, _ in stack.io.reads} == {stack.io.reads[0][0]}, "the other object alone was read"
    assert not stack.store.tiers[0].contains(one)
    assert stack.store.tiers[0].contains(two)
    assert stack.store.stats().failures == 1
    assert stack.disk.remove(one), "nothing holds it"
    assert stack.disk.stats().used_bytes == make(2)[0].object_nbytes

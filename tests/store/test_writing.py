"""Write policies, and the three events of a write."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blend.config import StoreConfig
from blend.errors import (
    Closed,
    InvalidConfig,
    InvalidInput,
    ObjectCorrupt,
    ResourceExhausted,
    TierUnavailable,
)
from blend.store import DiskTier, HostTier, Policy, TieredStore, open_store
from tests.store.helpers import BROKEN, NO_SPACE, OBJECT_NBYTES, FaultyIO, make, path_of, read


class HeldIO(FaultyIO):
    """System calls of which writes of objects wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        assert self.free.wait(30)
        return super().pwrite(fd, data, offset)


class Stack:
    def __init__(self, directory: Path, objects: int = 8, disk_objects: int = 1000, **policy: object) -> None:
        self.io = HeldIO()
        self.directory = directory
        self.host = HostTier(objects * OBJECT_NBYTES)
        self.disk = DiskTier(directory, disk_objects * OBJECT_NBYTES, fsync=False, io=self.io)
        agreed = Policy(**{"retry_seconds": 0.0, **policy})  # type: ignore[arg-type]
        self.store = TieredStore([self.host, self.disk], policy=agreed)

    def where(self, seed: int) -> tuple[bool, bool]:
        key = make(seed)[0].key
        return self.host.contains(key), self.disk.contains(key)


# ---------------------------------------------------------------- three events


def test_the_three_events_are_three_different_things(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.io.free.clear()
    header, payload = make(1)
    mutable = bytearray(payload)
    events = stack.store.put_async(header, mutable)
    assert events.copied.result(0)
    assert events.readable.result(0)
    mutable[:] = bytes(len(mutable))
    assert read(stack.store, header.key) == payload
    assert not events.durable.done()
    assert stack.store.write_stats().staging_bytes == OBJECT_NBYTES
    stack.io.free.set()
    assert events.durable.result(30)
    assert read(stack.disk, header.key) == payload
    assert stack.store.wait_idle(30)
    stats = stack.store.write_stats()
    assert (stats.staging_bytes, stats.waiting, stats.durable_errors) == (0, 0, 0)
    again = stack.store.put_async(header, payload)
    assert (again.copied.result(30), again.readable.result(30), again.durable.result(30)) == (True, False, True)
    stack.store.close()


def test_a_failed_write_is_tried_again_so_often_and_no_more(tmp_path: Path) -> None:
    stack = Stack(tmp_path, write_retries=2)
    stack.io.faults = {"pwrite": NO_SPACE}
    events = stack.store.put_async(*make(1))
    assert events.readable.result(30)
    with pytest.raises(TierUnavailable, match="ENOSPC"):
        events.durable.result(30)
    assert stack.store.wait_idle(30)
    stats = stack.store.write_stats()
    assert (stats.retries, stats.durable_errors, stats.readable_errors, stats.copied_errors) == (2, 1, 0, 0)
    assert stack.disk.stats().failures == 3
    assert stack.disk.stats().used_bytes == 0
    assert read(stack.store, make(1)[0].key) == make(1)[1]
    stack.io.faults = {}
    assert stack.store.put_async(*make(1)).durable.result(30)
    stack.store.close()


def test_a_retry_that_works_is_no_error(tmp_path: Path) -> None:
    class Once(HeldIO):
        failed = False

        def rename(self, source: str, target: str) -> None:
            if not self.failed and "objects" in target:
                self.failed = True
                raise OSError(BROKEN, "once")
            super().rename(source, target)

    io = Once()
    store = TieredStore(
        [HostTier(1 << 20), DiskTier(tmp_path, 1 << 20, fsync=False, io=io)], policy=Policy(retry_seconds=0.0)
    )
    assert store.put_async(*make(1)).durable.result(30)
    assert store.wait_idle(30)
    assert (store.write_stats().retries, store.write_stats().durable_errors) == (1, 0)
    store.close()


def test_what_the_host_does_not_take_is_staged_and_still_made_durable(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=1)
    stack.store.put(*make(0))
    stack.io.free.clear()
    with stack.host.get(make(0)[0].key):  # type: ignore[union-attr]
        header, payload = make(1)
        mutable = bytearray(payload)
        events = stack.store.put_async(header, mutable)
        assert events.copied.result(0)
        mutable[:] = bytes(len(mutable))
        with pytest.raises(ResourceExhausted):
            events.readable.result(0)
        stack.io.free.set()
        assert events.durable.result(30)
    assert read(stack.store, header.key) == payload
    assert stack.store.write_stats().readable_errors == 1
    stack.store.close()


def test_the_staging_budget_is_never_exceeded(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=40, staging_bytes=2 * OBJECT_NBYTES)
    stack.io.free.clear()
    waiting = [stack.store.put_async(*make(seed)) for seed in range(2)]
    assert stack.store.write_stats().staging_bytes == 2 * OBJECT_NBYTES
    threading.Timer(0.05, stack.io.free.set).start()
    full = stack.store.put_async(*make(2))  # no room to wait in: the caller writes, at once
    assert full.durable.done()
    assert full.durable.result(0)
    assert all(events.durable.result(30) for events in waiting)
    for seed in range(3, 30):
        assert stack.store.put_async(*make(seed)).durable.result(30)
    assert stack.store.write_stats().staging_peak_bytes <= 2 * OBJECT_NBYTES
    stack.store.close()


def test_wrong_input_is_raised_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    header, payload = make(1)
    with pytest.raises(ObjectCorrupt):
        stack.store.put_async(header, payload[::-1])
    with pytest.raises(InvalidInput, match="payload"):
        stack.store.put_async(header, payload[:-1])
    assert stack.store.write_stats().staging_bytes == 0
    assert stack.store.stats().used_bytes == 0
    stack.store.close()
    with pytest.raises(Closed):
        stack.store.put_async(header, payload)


def test_closing_finishes_what_is_queued(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    stack = Stack(tmp_path, objects=30)
    stack.io.free.clear()
    events = [stack.store.put_async(*make(seed)) for seed in range(20)]
    threading.Timer(0.05, stack.io.free.set).start()
    stack.store.close()
    assert all(event.durable.result(0) for event in events)
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("tiered-")]
    with DiskTier(tmp_path, 1 << 20) as disk:
        assert all(read(disk, make(seed)[0].key) == make(seed)[1] for seed in range(20))


def test_what_is_removed_before_it_was_durable_does_not_come_back(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.io.free.clear()
    first = stack.store.put_async(*make(0))
    events = stack.store.put_async(*make(1))
    assert stack.store.remove(make(1)[0].key)
    stack.io.free.set()
    assert first.durable.result(30)
    assert not events.durable.result(30)
    assert stack.where(1) == (False, False)
    stack.store.close()


# -------------------------------------------------------------------- policies


def test_selective_writes_go_through_after_so_many_hits(tmp_path: Path) -> None:
    stack = Stack(tmp_path, write="write_through_selective", write_hits=2)
    header, payload = make(1)
    assert stack.store.put(header, payload)
    assert not stack.store.put(header, payload)
    assert stack.where(1) == (True, False)
    assert not stack.store.put_async(*make(2)).durable.result(30)
    read(stack.store, header.key)
    assert stack.store.wait_idle(30)
    assert stack.where(1) == (True, False)
    read(stack.store, header.key)
    assert stack.store.wait_idle(30)
    assert stack.where(1) == (True, True)
    read(stack.store, header.key)
    assert stack.where(2) == (True, False)
    stack.store.close()


@pytest.mark.parametrize("write", ["write_through_selective", "write_back"])
def test_what_the_fastest_tier_cannot_hold_goes_below_at_once(tmp_path: Path, write: str) -> None:
    stack = Stack(tmp_path, objects=1, write=write)
    big, payload = make(7, tokens=200)
    assert stack.store.put(big, payload)
    assert read(stack.disk, big.key) == payload
    stack.store.close()


def test_write_back_writes_when_it_evicts(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=4, write="write_back")
    for seed in range(4):
        assert stack.store.put(*make(seed))
    assert [stack.where(seed) for seed in range(4)] == [(True, False)] * 4
    read(stack.store, make(0)[0].key)  # 1 is the least recently used now
    assert stack.store.put(*make(4))
    assert stack.where(1)[1]
    assert stack.where(0) == (True, False)
    for seed in range(5, 40):
        assert stack.store.put(*make(seed))
        assert all(any(stack.where(known)) for known in range(seed + 1))
    stats = stack.store.write_stats()
    assert stats.dirty == 4
    assert stats.dirty_bytes == 4 * OBJECT_NBYTES
    assert stack.store.flush() == 4
    assert stack.store.write_stats().dirty == 0
    assert all(read(stack.store, make(seed)[0].key) == make(seed)[1] for seed in range(40))
    stack.store.check_integrity()
    stack.store.close()


def test_write_back_keeps_what_the_lower_tier_does_not_take(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=3, write="write_back", write_retries=0)
    for seed in range(3):
        stack.store.put(*make(seed))
    stack.io.faults = {"pwrite": NO_SPACE}
    with pytest.raises((TierUnavailable, ResourceExhausted)):
        stack.store.put(*make(3))
    assert [stack.where(seed) for seed in range(4)] == [(True, False)] * 3 + [(False, False)]
    assert all(read(stack.store, make(seed)[0].key) == make(seed)[1] for seed in range(3))
    stack.io.faults = {}
    assert stack.store.put(*make(3))
    assert all(any(stack.where(seed)) for seed in range(4))
    stack.store.close()


def test_write_back_writes_everything_at_close(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=8, write="write_back")
    for seed in range(6):
        stack.store.put(*make(seed))
    stack.store.remove(make(3)[0].key)
    stack.store.close()
    with DiskTier(tmp_path, 1 << 20) as disk:
        assert sorted(disk.keys()) == sorted(make(seed)[0].key for seed in (0, 1, 2, 4, 5))


def test_an_object_that_is_below_already_is_not_dirty(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=2, write="write_back")
    stack.disk.put(*make(1))
    assert not stack.store.put(*make(1))
    assert stack.where(1) == (True, True)
    assert stack.store.write_stats().dirty == 0
    with pytest.raises(ObjectCorrupt):
        stack.store.put(make(2)[0], make(2)[1][::-1])
    assert stack.store.write_stats().dirty == 0
    stack.store.close()


def test_write_back_never_loses_a_key_under_many_threads(tmp_path: Path) -> None:
    stack = Stack(tmp_path, objects=6, write="write_back")
    rng = random.Random(3)
    known: set[int] = set()
    lock = threading.Lock()

    def work(part: int) -> int:
        mine = random.Random(part)
        lost = 0
        for seed in range(part * 100, part * 100 + 30):
            try:
                stack.store.put(*make(seed))
            except ResourceExhausted:
                continue
            with lock:
                known.add(seed)
                again = mine.choice(sorted(known))
            lost += read(stack.store, make(again)[0].key) != make(again)[1]
        return lost

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) == 0
    assert len(known) > 60
    assert all(any(stack.where(seed)) for seed in known)
    for seed in rng.sample(sorted(known), 20):
        assert stack.store.remove(make(seed)[0].key)
        assert stack.where(seed) == (False, False)
        assert stack.store.put(*make(seed))
    stack.store.check_integrity()
    stack.store.close()
    with DiskTier(tmp_path, 1 << 30) as disk:
        assert all(disk.contains(make(seed)[0].key) for seed in known)


def test_write_back_needs_a_tier_that_asks_before_it_evicts(tmp_path: Path) -> None:
    inner = TieredStore([HostTier(1 << 20)], name="inner")
    with pytest.raises(InvalidConfig, match="write_back"):
        TieredStore([inner, DiskTier(tmp_path, 1 << 20)], policy=Policy(write="write_back"))


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("write", "write_around"),
        ("write", None),
        ("write_hits", 0),
        ("write_retries", -1),
        ("retry_seconds", float("nan")),
        ("prefetch", "eager"),
        ("prefetch_base", -0.1),
        ("prefetch_per_ki_token", "1"),
        ("staging_bytes", 1.5),
        ("inflight_bytes", 0),
    ],
)
def test_policies_say_what_is_wrong(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"policy.{field}"):
        Policy(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("write_policy", "write_around"),
        ("write_hits", 0),
        ("write_retries", -1),
        ("prefetch_policy", "eager"),
        ("prefetch_base_ms", -1.0),
        ("prefetch_ms_per_ki_token", float("inf")),
        ("staging_bytes", -1),
        ("inflight_bytes", 0),
        ("high_watermark", 1.5),
        ("low_watermark", 0.96),
        ("lease_seconds", 0.0),
    ],
)
def test_settings_say_what_is_wrong(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"store.{field}"):
        StoreConfig(**{field: value})  # type: ignore[arg-type]


def test_the_prefetch_timeout_grows_with_the_request() -> None:
    policy = Policy(prefetch="timeout", prefetch_base=0.5, prefetch_per_ki_token=0.25)
    assert policy.prefetch_seconds(0) == 0.5
    assert policy.prefetch_seconds(2048) == 1.0
    assert Policy(prefetch="wait_complete").prefetch_seconds(2048) is None
    assert Policy(prefetch="best_effort").prefetch_seconds(2048) == 0.0


def test_settings_reach_the_store(tmp_path: Path) -> None:
    config = StoreConfig(
        host_bytes=10 * OBJECT_NBYTES,
        directory=tmp_path,
        fsync=False,
        write_policy="write_back",
        prefetch_policy="timeout",
        prefetch_base_ms=5.0,
        staging_bytes=123456,
        inflight_bytes=654321,
        high_watermark=0.5,
        low_watermark=0.3,
        lease_seconds=30.0,
    )
    asked: list[int] = []

    def allocate(nbytes: int) -> bytearray:
        asked.append(nbytes)
        return bytearray(nbytes)

    store, _ = open_store(config, allocate)
    with store:
        assert (store.policy.write, store.policy.prefetch_seconds(0)) == ("write_back", 0.005)
        assert store.write_stats().staging_capacity_bytes == 123456
        assert store.load_stats().inflight_capacity_bytes == 654321
        assert len(asked) == 1
        for seed in range(6):
            store.put(*make(seed))
        assert store.flush() == 6
        store.put(*make(6))
        assert store.tier_stats()[0].objects == 3
        lease = store.get(make(6)[0].key)
        assert lease is not None
        assert 0 < lease.seconds_left <= 30
    gc.collect()
    assert path_of(tmp_path, make(6)[0]).exists()

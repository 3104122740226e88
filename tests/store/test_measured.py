"""Budgets as they can be measured from outside, and what is computed how often, by many threads."""

from __future__ import annotations

import gc
import os
import random
import stat
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blend.errors import ResourceExhausted
from blend.store import DiskTier, FileIO, Header, HostTier, Policy, TieredStore
from blend.store.buffers import Buffer
from tests.store.helpers import OBJECT_NBYTES, make

THREADS = 64
ROOM = 100 * OBJECT_NBYTES


class MeasuringIO(FileIO):
    """After every call that changes a file's length or name, adds up the bytes of the store on the file system.

    Files that have been removed and are still open count too. ``most`` is the largest sum that was ever seen.
    """

    def __init__(self, directory: Path) -> None:
        self.most = 0
        self.measured = 0
        self._folders = (str(directory / "objects"), str(directory / "quarantine"))
        self._paths: set[str] = set()
        self._open: set[int] = set()
        # Descriptors are closed by finalizers, too, which may run in a thread that is in here.
        self._lock = threading.RLock()

    def walk(self) -> int:
        """Add up the bytes of all files that have a name."""
        return sum(
            os.stat(f"{at}/{name}").st_size for top in self._folders for at, _, names in os.walk(top) for name in names
        )

    def measure(self) -> None:
        sizes: dict[int, int] = {}
        with self._lock:
            for path in list(self._paths):
                try:
                    found = os.stat(path)
                except FileNotFoundError:
                    self._paths.discard(path)
                    continue
                sizes[found.st_ino] = found.st_size
            for fd in list(self._open):
                if fd in self._open and stat.S_ISREG((found := os.fstat(fd)).st_mode):
                    sizes[found.st_ino] = found.st_size
            self.most = max(self.most, sum(sizes.values()))
            self.measured += 1

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            fd = super().open(path, flags)
            if path.startswith(self._folders):
                self._open.add(fd)
                if not flags & os.O_DIRECTORY:
                    self._paths.add(path)
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.discard(fd)
            super().close(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self.measure()

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if target.startswith(self._folders):
            with self._lock:
                self._paths.add(target)
            self.measure()


class Memory:
    """Where the host tier's memory comes from: how much was asked for, and how often."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> bytearray:
        self.asked.append(nbytes)
        return bytearray(nbytes)


@pytest.mark.slow
def test_64_threads_on_1000_keys_never_have_more_than_the_budget_of_100(tmp_path: Path) -> None:
    objects = [make(seed) for seed in range(1000)]
    io, memory = MeasuringIO(tmp_path), Memory()
    host = HostTier(ROOM, allocate=memory.allocate)
    store = TieredStore([host, DiskTier(tmp_path, ROOM, fsync=False, io=io)])
    asks = [number for number in range(1000) for _ in range(2)]
    random.Random(4).shuffle(asks)
    computed: Counter[int] = Counter()
    lock = threading.Lock()
    barrier = threading.Barrier(THREADS)

    def ask(part: int) -> Counter[str]:
        outcome: Counter[str] = Counter()
        barrier.wait(30)
        for number in asks[part::THREADS]:
            header, payload = objects[number]

            def compute(
                number: int = number, header: Header = header, payload: bytes = payload
            ) -> tuple[Header, Buffer]:
                with lock:
                    computed[number] += 1
                return header, payload

            try:
                lease = store.get_or_put(header.key, compute, 60)
            except ResourceExhausted:
                outcome["refused"] += 1
                continue
            if lease is None:
                outcome["evicted"] += 1
                continue
            with lease:
                outcome["right" if bytes(lease.payload()) == payload else "wrong"] += 1
        return outcome

    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(ask, range(THREADS)), Counter())
    assert total["wrong"] == 0
    assert sum(total.values()) == len(asks)
    assert total["right"] > 0.9 * len(asks), total
    assert len(computed) == 1000, "each was missing at first"
    assert io.measured > 1000
    assert ROOM - 10 * OBJECT_NBYTES < io.most <= ROOM
    assert memory.asked == [memory.asked[0]]
    assert memory.asked[0] <= 1.02 * ROOM, "the arena, with what alignment costs; nothing else holds objects"
    for tier in store.tier_stats():
        assert tier.used_bytes <= tier.capacity_bytes
        assert tier.evictions > 800
    store.check_integrity()
    gc.collect()
    assert io.walk() == store.tier_stats()[1].used_bytes <= ROOM
    store.close()


def test_64_threads_on_one_key_compute_it_once_and_read_it_from_one_place(tmp_path: Path) -> None:
    """In every round anew, with the key in no tier, or thrown out of all of them by others meanwhile."""
    store = TieredStore([HostTier(ROOM), DiskTier(tmp_path, ROOM, fsync=False)])
    for number in range(10):
        header, payload = make(number)
        calls: list[str] = []
        barrier = threading.Barrier(THREADS)

        def compute(
            header: Header = header, payload: bytes = payload, calls: list[str] = calls
        ) -> tuple[Header, bytes]:
            calls.append(threading.current_thread().name)
            time.sleep(0.002)
            return header, payload

        def ask(_: int, header: Header = header, barrier: threading.Barrier = barrier) -> bytes:
            barrier.wait(30)
            lease = store.get_or_put(header.key, compute, 30)
            assert lease is not None
            with lease:
                return bytes(lease.payload())

        with ThreadPoolExecutor(THREADS) as pool:
            assert set(pool.map(ask, range(THREADS))) == {payload}
        assert len(calls) == 1
    store.close()


def test_the_staging_and_in_flight_budgets_hold_under_many_threads(tmp_path: Path) -> None:
    """Writers and loaders at once; peaks are the store's own, and the memory that it allocates is counted here."""
    size = make(0)[0].payload_nbytes
    policy = Policy(staging_bytes=3 * OBJECT_NBYTES, inflight_bytes=4 * size, retry_seconds=0.0)
    disk = DiskTier(tmp_path, 200 * OBJECT_NBYTES, fsync=False)
    store = TieredStore([HostTier(10 * OBJECT_NBYTES), disk], policy=policy)
    objects = [make(seed) for seed in range(60)]

    def work(part: int) -> int:
        rng, wrong = random.Random(part), 0
        for _ in range(15):
            header, payload = rng.choice(objects)
            store.put_async(header, payload)
            wanted = rng.sample(objects, 5)
            with store.load([h.key for h, _ in wanted]) as loads:
                for h, data in wanted:
                    if h.key in loads:
                        wrong += bytes(loads[h.key].payload()) != data
        return wrong

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, range(16))) == 0
    assert store.wait_idle(30)
    writes, loads = store.write_stats(), store.load_stats()
    assert 0 < writes.staging_peak_bytes <= writes.staging_capacity_bytes == 3 * OBJECT_NBYTES
    assert 0 < loads.inflight_peak_bytes <= loads.inflight_capacity_bytes == 4 * size
    assert (writes.staging_bytes, loads.inflight_bytes, loads.failed) == (0, 0, 0)
    store.check_integrity()
    store.close()

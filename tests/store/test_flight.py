"""Single flight: done once, nobody starves, no wait without bound."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blend.errors import ResourceExhausted
from blend.store import DiskTier, Header, HostTier, SingleFlight, TieredStore
from blend.store.buffers import Buffer
from tests.store.helpers import OBJECT_NBYTES, make


def test_what_many_ask_for_is_done_once() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    begun, free = threading.Event(), threading.Event()
    calls: list[str] = []

    def work() -> int:
        calls.append(threading.current_thread().name)
        begun.set()
        assert free.wait(30)
        return 7

    with ThreadPoolExecutor(64) as pool:
        asked = [pool.submit(flights.run, "key", work) for _ in range(64)]
        assert begun.wait(30)
        assert flights.run("other", lambda: 8) == 8
        while sum(future.running() for future in asked) < 60:
            time.sleep(0.001)
        free.set()
        assert {future.result(30) for future in asked} == {7}
    assert 1 <= len(calls) <= 5  # those that had not asked yet when the first was done may ask anew
    assert len(flights) == 0


def test_when_the_leader_fails_one_waiter_takes_over() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    leader = flights.join("key")
    assert leader.leads
    waiters = [flights.join("key") for _ in range(3)]
    assert not any(ticket.leads or ticket.done for ticket in waiters)
    flights.fail("key")
    assert [ticket.leads for ticket in waiters] == [True, False, False]
    flights.fail("key")
    assert [ticket.leads for ticket in waiters] == [True, True, False]
    flights.land("key", "value")
    assert waiters[2].done
    assert waiters[2].value == "value"
    assert len(flights) == 0
    assert flights.join("key").leads
    flights.fail("key")
    assert len(flights) == 0


def test_each_failure_is_told_to_who_had_it_alone() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    lock = threading.Lock()
    calls = 0

    def work() -> int:
        nonlocal calls
        with lock:
            calls += 1
            number = calls
        time.sleep(0.02)
        if number <= 3:
            raise ValueError(number)
        return number

    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(flights.run, "key", work) for _ in range(16)]
        errors = [future.exception(30) for future in asked]
    assert sum(isinstance(error, ValueError) for error in errors) == 3
    results = [future.result() for future, error in zip(asked, errors, strict=True) if error is None]
    assert len(results) == 13
    assert min(results) >= 4


def test_waiting_is_bounded() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    assert flights.join("key").leads
    with pytest.raises(ResourceExhausted, match="key"):
        flights.run("key", lambda: 1, timeout=0.01)
    late = flights.join("key")
    flights.fail("key")
    assert late.leads  # who gave up is not asked to lead
    flights.land("key", 2)


@pytest.fixture
def store(tmp_path: Path) -> TieredStore:
    return TieredStore([HostTier(100 * OBJECT_NBYTES), DiskTier(tmp_path, 100 * OBJECT_NBYTES, fsync=False)])


def test_64_threads_on_one_key_compute_it_once(store: TieredStore) -> None:
    header, payload = make(1)
    calls: list[int] = []
    barrier = threading.Barrier(64)

    def compute() -> tuple[Header, Buffer]:
        calls.append(1)
        time.sleep(0.01)
        return header, payload

    def ask(_: int) -> bytes:
        barrier.wait(30)
        lease = store.get_or_put(header.key, compute)
        assert lease is not None
        with lease:
            return bytes(lease.payload())

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(ask, range(64))) == {payload}
    assert len(calls) == 1
    assert 0 < store.load_stats().joined < 64
    store.check_integrity()


def test_a_computation_that_fails_is_taken_over(store: TieredStore) -> None:
    header, payload = make(1)
    attempts: list[int] = []

    def compute() -> tuple[Header, Buffer]:
        attempts.append(1)
        time.sleep(0.02)
        if len(attempts) == 1:
            raise RuntimeError("the first one fails")
        return header, payload

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(store.get_or_put, header.key, compute, 30) for _ in range(8)]
        errors = [future.exception(30) for future in asked]
    assert sum(isinstance(error, RuntimeError) for error in errors) == 1
    assert len(attempts) == 2


@pytest.mark.slow
def test_64_threads_on_1000_keys_under_a_budget_for_100(store: TieredStore) -> None:
    objects = [make(seed) for seed in range(1000)]
    over: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            over.extend(t.used_bytes for t in store.tier_stats() if t.used_bytes > t.capacity_bytes)

    def ask(part: int) -> int:
        wrong = 0
        for step in range(40):
            header, payload = objects[(part * 37 + step * 101) % 1000]
            try:
                lease = store.get_or_put(header.key, lambda header=header, payload=payload: (header, payload), 30)
            except ResourceExhausted:
                continue  # everything else is being read or written
            if lease is not None:
                with lease:
                    wrong += bytes(lease.payload()) != payload
        return wrong

    watcher = threading.Thread(target=watch, name="budget watcher")
    watcher.start()
    try:
        with ThreadPoolExecutor(64) as pool:
            assert sum(pool.map(ask, range(64))) == 0
    finally:
        stop.set()
        watcher.join()
    assert not over
    store.check_integrity()
    store.close()

"""Threads that take calls which may stall."""

from __future__ import annotations

import threading
from time import sleep

import pytest

from blend.errors import Closed, TierUnavailable
from blend.store.deadline import DeadlineWorkers


def test_it_returns_and_raises_what_the_call_does() -> None:
    workers = DeadlineWorkers("workers", threads=2, waiting=4)
    assert workers.call("adding", lambda: 1 + 1, 5.0) == 2
    with pytest.raises(ZeroDivisionError):
        workers.call("dividing", lambda: 1 // 0, 5.0)
    assert workers.call("again", lambda: 3, 5.0) == 3
    assert workers.close(5.0)
    with pytest.raises(Closed):
        workers.call("late", lambda: 4, 1.0)
    assert not any(thread.name.startswith("workers-") for thread in threading.enumerate())


def test_a_call_that_stalls_costs_its_deadline_and_is_undone_when_it_ends() -> None:
    workers = DeadlineWorkers("workers", threads=1, waiting=4)
    stall, undone = threading.Event(), []

    def stalled() -> str:
        stall.wait()
        return "late"

    with pytest.raises(TierUnavailable, match=r"reading x: no answer within 0\.1 s"):
        workers.call("reading x", stalled, 0.1, undone.append)
    began = threading.Event()
    with pytest.raises(TierUnavailable, match="no answer"):
        workers.call("never begun", began.set, 0.1)
    assert workers.late == 2
    assert not workers.close(0.1)
    stall.set()
    while not undone:
        sleep(0.01)
    assert undone == ["late"]
    assert not began.is_set()


def test_the_queue_is_bounded() -> None:
    workers = DeadlineWorkers("workers", threads=1, waiting=2)
    stall, running = threading.Event(), threading.Event()

    def stalled() -> None:
        running.set()
        stall.wait()

    workers.submit(stalled, 1.0)
    running.wait()
    workers.submit(stall.wait, 1.0)  # type: ignore[arg-type]
    workers.submit(stall.wait, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TierUnavailable, match="waiting already"):
        workers.submit(stall.wait, 0.05)  # type: ignore[arg-type]
    stall.set()
    assert workers.close(5.0)


def test_a_stalled_call_keeps_its_memory() -> None:
    workers = DeadlineWorkers("workers", threads=1, waiting=2)
    stall, gone = threading.Event(), threading.Event()

    class Memory:
        def __del__(self) -> None:
            gone.set()

    def transfer(memory: Memory) -> None:
        stall.wait()

    def ask() -> None:
        memory = Memory()
        with pytest.raises(TierUnavailable):
            workers.call("transfer", lambda: transfer(memory), 0.05)

    ask()
    assert not gone.is_set()
    stall.set()
    assert gone.wait(5.0)
    assert workers.close(5.0)

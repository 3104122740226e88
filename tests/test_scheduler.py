"""Turns and background work."""

from __future__ import annotations

import threading
import time

import pytest

from blend.errors import Closed
from blend.scheduler import Background, Turns


def wait_until(condition, timeout: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_requests_go_in_order_and_background_last() -> None:
    turns, order = Turns(), []
    threads = []

    def take(name: str, background: bool) -> None:
        with turns.turn(background=background):
            order.append(name)

    with turns.turn():
        for count, (name, background) in enumerate([("b1", True), ("r1", False), ("b2", True), ("r2", False)], 1):
            threads.append(threading.Thread(target=take, args=(name, background)))
            threads[-1].start()
            wait_until(lambda count=count: len(turns._queue) + len(turns._background) == count)
        assert turns.waiting == 2
    for thread in threads:
        thread.join(10)
    assert order == ["r1", "r2", "b1", "b2"]


def test_background_keeps_out_of_the_gaps_between_a_requests_steps() -> None:
    turns, order = Turns(patience=60), []

    def work() -> None:
        with turns.turn(background=True):
            order.append("background")

    thread = threading.Thread(target=work)
    with turns.request():
        thread.start()
        for step in range(3):
            with turns.turn():
                order.append(step)
            time.sleep(0.02)
    thread.join(10)
    assert order == [0, 1, 2, "background"]


def test_background_waits_for_a_stream_that_nobody_reads_only_so_long() -> None:
    turns = Turns(patience=0.05)
    with turns.request(), turns.turn(background=True) as waited:
        assert waited >= 50


def test_a_turn_is_given_back_after_an_error() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.turn():
        raise KeyError
    with turns.turn() as waited:
        assert waited >= 0


def test_close_refuses_those_who_wait() -> None:
    turns, seen = Turns(), []

    def take() -> None:
        try:
            with turns.turn():
                seen.append("ran")
        except Closed:
            seen.append("closed")

    thread = threading.Thread(target=take)
    with turns.turn():
        thread.start()
        wait_until(lambda: turns.waiting == 1)
        closer = threading.Thread(target=turns.close)
        closer.start()
        thread.join(10)
        assert seen == ["closed"]
    closer.join(10)
    assert not closer.is_alive()
    with pytest.raises(Closed), turns.turn():
        pass


def test_background_work_is_bounded_deduplicated_and_survives_errors() -> None:
    turns, done, gate = Turns(), [], threading.Event()

    def work(key: object) -> None:
        gate.wait(10)
        if key == "bad":
            raise ValueError(key)
        done.append(key)

    background = Background(turns, work, "test-background", limit=3)
    assert background.submit("first")
    wait_until(lambda: background._running)
    assert [background.submit(k) for k in ("bad", "a", "a", "b", "c")] == [True, True, True, True, False]
    gate.set()
    assert background.wait_idle(10)
    assert done == ["first", "a", "b"]
    assert (background.done, background.failed, background.dropped) == (3, 1, 1)
    gate.clear()
    for key in ("d", "e", "f"):
        background.submit(key)
        wait_until(lambda: background._running)
    background.discard(lambda key: key == "e")
    gate.set()
    assert background.wait_idle(10)
    assert done == ["first", "a", "b", "d", "f"]
    background.close()
    assert not background.submit("late")
    assert "test-background" not in {t.name for t in threading.enumerate()}

"""The second thread that takes part in a call: nothing of it outlives the call."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from blend.helper import Helper


@pytest.fixture
def helper() -> Helper:
    made = Helper("helper")
    yield made
    made.close()


def test_every_piece_is_done_once_by_two_threads(helper: Helper) -> None:
    both = threading.Barrier(2)
    done: list[tuple[int, str]] = []

    def work(piece: int) -> None:
        if piece < 2:
            both.wait(30)  # passes only if both threads are at work
        done.append((piece, threading.current_thread().name))

    helper.each(work, range(100))
    assert sorted(piece for piece, _ in done) == list(range(100))
    assert {name for _, name in done} == {threading.current_thread().name, "helper"}


def test_one_piece_is_the_caller_s(helper: Helper) -> None:
    names: list[str] = []
    helper.each(lambda _: names.append(threading.current_thread().name), [1])
    helper.each(lambda _: names.append("none"), [])
    assert names == [threading.current_thread().name]


@pytest.mark.parametrize("whose", ["caller", "helper"])
def test_an_error_of_either_thread_is_raised_when_both_are_done(helper: Helper, whose: str) -> None:
    both, under_way, begun = threading.Barrier(2), [0], []

    def work(piece: int) -> None:
        begun.append(piece)
        under_way[0] += 1
        try:
            both.wait(30)
            if (threading.current_thread().name == "helper") == (whose == "helper"):
                raise ValueError(whose)
            both.wait(0.2)
        except threading.BrokenBarrierError:
            pass
        finally:
            under_way[0] -= 1

    with pytest.raises(ValueError, match=whose):
        helper.each(work, range(50))
    assert under_way == [0]
    assert len(begun) < 50, "after an error nothing more begins"


def test_a_helper_at_work_elsewhere_keeps_nobody_waiting(helper: Helper) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(piece: int) -> None:
        if threading.current_thread().name == "helper":
            inside.set()
            go.wait(30)
        else:
            inside.wait(30)

    other = threading.Thread(target=helper.each, args=(slow, range(2)))
    other.start()
    assert inside.wait(30)
    done: list[int] = []
    helper.each(done.append, range(10))
    assert sorted(done) == list(range(10))
    assert other.is_alive(), "the other call is still under way"
    go.set()
    other.join(30)
    assert not other.is_alive()


def test_it_works_alone_once_closed(helper: Helper) -> None:
    helper.each(lambda _: None, range(4))
    helper.close()
    helper.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "helper"]
    done: list[int] = []
    helper.each(done.append, range(10))
    assert done == list(range(10))


def test_a_thread_that_cannot_start_is_done_without(monkeypatch: pytest.MonkeyPatch, helper: Helper) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        done: list[int] = []
        helper.each(done.append, range(10))
        assert done == list(range(10))
        helper.close()


def test_an_interrupted_caller_leaves_nothing_under_way(helper: Helper) -> None:
    inside, under_way = threading.Event(), [0]

    def work(piece: int) -> None:
        if threading.current_thread().name == "helper":
            under_way[0] += 1
            inside.set()
            time.sleep(0.1)
            under_way[0] -= 1
        else:
            inside.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        helper.each(work, range(50))
    assert under_way == [0]


def test_an_interrupt_is_raised_even_if_the_other_thread_failed_first(helper: Helper) -> None:
    failed = threading.Event()

    def work(piece: int) -> None:
        if threading.current_thread().name == "helper":
            failed.set()
            raise OSError("device")
        failed.wait(30)
        time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        helper.each(work, range(2))


@pytest.mark.usefixtures("interrupts_arrive")
def test_an_interrupt_while_the_other_thread_is_waited_for_waits_for_it(helper: Helper) -> None:
    """As a signal does: it ends the wait for the lock, and is raised there."""
    inside, under_way = threading.Event(), [0]
    caller = threading.get_ident()

    def work(piece: int) -> None:
        if threading.current_thread().name == "helper":
            under_way[0] += 1
            inside.set()
            time.sleep(0.1)
            signal.pthread_kill(caller, signal.SIGINT)
            time.sleep(0.3)
            under_way[0] -= 1
        else:
            inside.wait(30)

    with pytest.raises(KeyboardInterrupt):
        helper.each(work, range(2))
    assert under_way == [0]

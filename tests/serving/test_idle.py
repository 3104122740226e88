"""The engine's thread sleeps while there is nothing for it to do: awake, it would take the interpreter from others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest

from blend.serving.job import Job
from blend.serving.scheduler import Scheduler
from blend.serving.steps import Alone, Aside, Steps, do
from tests.serving import fakes

LONG = 600.0
WATCHED_SECONDS = 0.3


class Place:
    """Room for a request, of which there is enough."""

    def take(self, last: bool) -> bool:
        return True

    def give(self) -> None:
        pass


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """An entry for each time that the thread woke and looked for work."""
    woken: list[float] = []
    real = Scheduler._round

    def counted(self: Scheduler) -> None:
        woken.append(monotonic())
        real(self)

    monkeypatch.setattr(Scheduler, "_round", counted)
    return woken


@pytest.fixture
def scheduler(rounds: list[float]) -> Iterator[Scheduler]:
    made = fakes.idle()
    yield made
    made.close()
    made.join()


@pytest.fixture
def sleeps(rounds: list[float]) -> Callable[[], bool]:
    """Whether the thread sleeps once it has seen to what came last: a busy one would look thousands of times."""

    def check() -> bool:
        sleep(0.05)
        before = len(rounds)
        sleep(WATCHED_SECONDS)
        return len(rounds) - before <= 2

    return check


def test_without_work(scheduler: Scheduler, sleeps: Callable[[], bool]) -> None:
    assert sleeps()
    assert scheduler.call(lambda: 7) == 7
    assert sleeps()


def test_while_another_thread_waits_for_chunks(scheduler: Scheduler, sleeps: Callable[[], bool]) -> None:
    loaded = threading.Event()

    def steps() -> Steps[bool]:
        return (yield from do(Aside(lambda: loaded.wait(60))))

    job = scheduler.submit(Job(steps(), deadline=monotonic() + LONG))
    assert sleeps()
    loaded.set()
    assert job.done.result(60)


def test_what_waits_for_a_place_begins_when_another_ends(rounds: list[float]) -> None:
    """However it ends: nothing else wakes the thread."""

    def request() -> Steps[int]:
        return (yield from do(Alone(lambda: 7)))

    scheduler = fakes.idle(max_running=1)
    with fakes.busy(scheduler):
        jobs = [scheduler.submit(Job(request(), "a", room=Place())) for _ in range(3)]
    assert [job.done.result(20) for job in jobs] == [7] * 3
    scheduler.close()
    scheduler.join()


def test_while_work_in_the_background_waits_for_a_gap(scheduler: Scheduler, sleeps: Callable[[], bool]) -> None:
    loaded = threading.Event()

    def request() -> Steps[bool]:
        return (yield from do(Aside(lambda: loaded.wait(60))))

    def background() -> Steps[int]:
        return (yield from do(Alone(lambda: 7)))

    held = scheduler.submit(Job(request(), room=Place()))
    waiting = scheduler.submit_background(Job(background()), LONG)
    assert sleeps() and not waiting.done.done()
    loaded.set()
    assert held.done.result(60) and waiting.done.result(60) == 7

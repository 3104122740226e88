"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

import pytest

from blend.errors import TierUnavailable
from blend.store.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("remote", threshold=3, cooldown=5.0, clock=clock)


def closed(breaker: Breaker) -> bool:
    try:
        breaker.check()
    except TierUnavailable:
        return False
    return True


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed("no answer")
        breaker.succeeded()
        breaker.failed("no answer")
        assert closed(breaker)
    breaker.failed("no answer")
    breaker.failed("no answer from 10.0.0.1")
    assert breaker.opened == 1
    assert breaker.reason == "no answer from 10.0.0.1"
    with pytest.raises(TierUnavailable, match=r"remote: down: no answer from 10\.0\.0\.1"):
        breaker.check()


def test_one_call_finds_out(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed("x")
    clock.now += 5
    breaker.peek()  # takes nobody's turn
    assert closed(breaker)
    assert not closed(breaker)  # one is trying
    breaker.failed("y")
    assert not closed(breaker)
    clock.now += 5
    assert closed(breaker)
    breaker.succeeded()
    assert closed(breaker)
    assert closed(breaker)
    assert breaker.reason == ""
    assert breaker.opened == 1


def test_a_trial_that_never_reports_back_keeps_nobody_out(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed("x")
    clock.now += 5
    assert closed(breaker)
    clock.now += 4
    assert not closed(breaker)
    clock.now += 1
    assert closed(breaker)


def test_health_opens_and_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.health("the master does not answer")
    clock.now += 100
    assert not closed(breaker)
    breaker.succeeded()
    assert not closed(breaker)
    breaker.health("still not")
    assert breaker.reason == "still not"
    assert breaker.opened == 1
    breaker.health("")
    assert closed(breaker)
    breaker.failed("not really")  # a single one is enough now
    assert not closed(breaker)
    assert breaker.opened == 2

"""Work that stops when a step's time is up: where, for how long, and with what of vLLM's in place."""

# ruff: noqa: E402 - nothing of vLLM is imported where it is not installed

from __future__ import annotations

import pytest

from tests.connector.conftest import require_vllm

require_vllm()

from vllm.forward_context import get_forward_context, is_forward_context_available, override_forward_context

from blend.connector.vllm.tasks import Pace, Task, checkpoint, clock, rows_at_once

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


def test_it_stops_at_the_first_checkpoint_behind_its_time_and_goes_on_from_there() -> None:
    seen: list[int] = []

    def work() -> None:
        for number in range(3):
            seen.append(number)
            checkpoint()

    task = Task(work, Pace())
    assert not task.go_on(0.0)
    assert seen == [0]
    assert task.go_on(60.0)
    assert seen == [0, 1, 2]


def test_outside_of_a_task_nothing_stops() -> None:
    checkpoint(7)
    assert rows_at_once(512) == 512


def test_what_it_raises_comes_out_where_it_is_run() -> None:
    def work() -> None:
        checkpoint()
        raise KeyError("lost")

    task = Task(work, Pace())
    task.go_on(0.0)
    with pytest.raises(KeyError):
        task.go_on(0.0)


def test_given_up_it_lets_go_of_what_it_holds() -> None:
    held: list[str] = []

    def work() -> None:
        held.append("canvas")
        try:
            checkpoint()
        finally:
            held.clear()

    task = Task(work, Pace())
    task.go_on(0.0)
    assert held
    task.end()
    assert not held
    task.end()


def test_one_that_never_began_can_be_given_up() -> None:
    def work() -> None:
        raise AssertionError("it ran")

    Task(work, Pace()).end()


def test_each_side_has_its_own_forward_context() -> None:
    """vLLM's is global: a pass that stands still must neither lose its own nor leave it to the engine."""
    inner, outer = object(), object()
    found: list[object] = []

    def work() -> None:
        with override_forward_context(inner):  # type: ignore[arg-type]
            checkpoint()
            found.append(get_forward_context())
        found.append(is_forward_context_available())

    task = Task(work, Pace())
    with override_forward_context(outer):  # type: ignore[arg-type]
        task.go_on(0.0)
        assert get_forward_context() is outer
    assert not is_forward_context_available()
    task.go_on(60.0)
    assert found == [inner, False]
    assert not is_forward_context_available()


def test_its_clock_stands_still_while_it_does() -> None:
    times: list[float] = []

    def work() -> None:
        times.append(clock())
        checkpoint()
        times.append(clock())

    task = Task(work, Pace())
    task.go_on(0.0)
    begun = clock()
    while clock() < begun + 0.2:
        pass
    task.go_on(60.0)
    assert task.paused >= 0.2
    assert times[1] - times[0] < task.paused


def test_passes_are_as_long_as_steps_allow() -> None:
    pace = Pace()
    assert pace.rows(1.0, 512) == 64  # nothing is known yet
    pace.saw(100, 0.1)
    assert pace.rows(0.4, 512) == 100  # a quarter of the time
    assert pace.rows(0.0, 512) == 16
    assert pace.rows(60.0, 512) == 512
    assert pace.rows(0.0, 3) == 3

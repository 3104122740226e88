"""Work that goes on over many of the engine's steps, in the engine's own thread.

A task runs until the time that a step has for it is up, stops where it stands, in between two layers of a forward pass
for example, and goes on from there in a later step. It has a stack of its own, a greenlet, so that code that knows
nothing of steps, such as a selector's probe, can be stopped in its midst. What is global to a forward pass of vLLM is
kept for the task meanwhile, and the engine has its own back.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from greenlet import getcurrent, greenlet
from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available
from vllm.forward_context import override_forward_context as forward_context

from blend.model.shards import ALONE, Shards

_STRETCHES = 4
"""Stretches between two checkpoints that a step's time is to have at least, so that it is not overrun by much."""

_FEWEST_ROWS = 16
"""Fewer rows in a pass would take as long, for the weights are read all the same."""

_WEIGHT = 0.25
"""Of a new measurement in the average."""


class Pace:
    """How long one row of one layer takes, learnt from the stretches between checkpoints.

    Args:
        shards: those who share the model's heads. They have to stop at the same places: the first one's clock holds.
    """

    def __init__(self, shards: Shards = ALONE) -> None:
        self.seconds = 0.0
        self._shards = shards

    def saw(self, rows: int, seconds: float) -> None:
        """Take note of a layer that took ``seconds`` for ``rows`` rows."""
        found = seconds / rows
        self.seconds = found if not self.seconds else (1 - _WEIGHT) * self.seconds + _WEIGHT * found

    def rows(self, seconds: float, most: int) -> int:
        """Return how many rows, ``most`` at most, have a layer take no more than its part of ``seconds``."""
        wanted = seconds / _STRETCHES / self.seconds if self.seconds else 4 * _FEWEST_ROWS
        return self._shards.first(int(min(most, max(_FEWEST_ROWS, wanted))))

    def over(self, until: float) -> bool:
        """Return whether the clock has come to ``until``."""
        return bool(self._shards.first(perf_counter() >= until))


class Task(greenlet):
    """One piece of work. It begins with the first :meth:`go_on`; what it raises comes out of that.

    Args:
        work: what is to be done. It calls :func:`checkpoint` where it may be stopped.
        pace: of forward passes.

    Attributes:
        paused: seconds that it has stood still in since it began.
    """

    def __init__(self, work: Callable[[], object], pace: Pace) -> None:
        super().__init__(work)
        self.paused = 0.0
        self._pace = pace
        self._context: ForwardContext | None = None
        self._until = 0.0
        self._budget = 0.0
        self._left: float | None = None
        self._passed = 0.0

    def go_on(self, seconds: float) -> bool:
        """Run for about so long; returns whether the work is done."""
        begun = self._passed = perf_counter()
        self._until, self._budget = begun + seconds, seconds
        if self._left is not None:
            self.paused += begun - self._left
        with forward_context(self._context), torch.inference_mode():
            self.switch()
        self._left = perf_counter()
        return self.dead

    def end(self) -> None:
        """Give it up where it stands; what it holds is let go of as if it had failed there."""
        if self and not self.dead:
            with forward_context(self._context), torch.inference_mode():
                self.throw()

    def reached(self, rows: int) -> None:
        """What :func:`checkpoint` does. To be called by the work itself."""
        if rows:
            self._pace.saw(rows, perf_counter() - self._passed)
        if self._pace.over(self._until):
            self._context = get_forward_context() if is_forward_context_available() else None
            assert self.parent is not None
            self.parent.switch()
        self._passed = perf_counter()

    def rows(self, most: int) -> int:
        """What :func:`rows_at_once` returns in it."""
        return self._pace.rows(self._budget, most)


def checkpoint(rows: int = 0) -> None:
    """Let the engine's step end here if its time is up. Does nothing outside of a task.

    Args:
        rows: of the layer that was computed since the last checkpoint; 0 if it was something else.
    """
    task = getcurrent()
    if isinstance(task, Task):
        task.reached(rows)


def rows_at_once(most: int) -> int:
    """Return how many rows the next forward pass should have at most, so that checkpoints come often enough."""
    task = getcurrent()
    return task.rows(most) if isinstance(task, Task) else most


def clock() -> float:
    """Seconds, which in a task do not go on while it stands still."""
    task = getcurrent()
    return perf_counter() - (task.paused if isinstance(task, Task) else 0.0)

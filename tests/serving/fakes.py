"""A scheduler without a model, and a thread of it that is kept busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, cast

import torch

from blend.errors import ResourceExhausted
from blend.model.decoder import Decoder
from blend.model.rows import Rows
from blend.recompute.canvas import Canvas
from blend.recompute.planner import PrefillSpeed
from blend.serving.passes import Passes
from blend.serving.scheduler import Scheduler
from blend.serving.shares import Shares


class FakeDecoder:
    """Notes every pass as ``(canvas, first position, rows)`` of each request; the next token is the position's."""

    device = torch.device("cpu")
    layers = heads = head_dim = 1
    linear_flops_per_row = 1.0

    def __init__(self) -> None:
        self.passes: list[list[tuple[Canvas, int, int]]] = []
        self.failing: Canvas | None = None
        self.before: Callable[[], None] = lambda: None

    def forward(self, batch: Sequence[Rows]) -> torch.Tensor:
        self.before()
        if any(rows.canvas is self.failing for rows in batch):
            raise RuntimeError("a bad canvas")
        self.passes.append([(rows.canvas, int(rows.at[0]), len(rows)) for rows in batch])
        return torch.nn.functional.one_hot(torch.tensor([int(rows.at[-1]) for rows in batch]), 10_000).float()


class Memory:
    """Room for work, of which there is as much as ``free`` says; ``taken`` counts how often it was."""

    def __init__(self, free: int = 1, whose: Memory | None = None) -> None:
        self.free = free
        self.taken = 0
        self._whose = whose or self

    def shared(self) -> Memory:
        """Room of the same memory for another one."""
        return Memory(whose=self)

    def take(self, last: bool) -> bool:
        whose = self._whose
        if not whose.free:
            if last:
                raise ResourceExhausted("never")
            return False
        whose.free -= 1
        whose.taken += 1
        return True

    def give(self) -> None:
        self._whose.free += 1


def canvas(length: int = 2000) -> Canvas:
    """A canvas of a model of next to no size."""
    return Canvas(1, 1, length, 1, torch.float32, torch.device("cpu"))


def idle(
    decoder: FakeDecoder | None = None,
    *,
    max_rows: int = 100,
    shared_rows: int = 10,
    max_running: int = 8,
    max_waiting: int = 8,
) -> Scheduler:
    """A scheduler that nobody uses yet."""
    fake = cast(Any, decoder or FakeDecoder())
    shares = Shares()
    passes = Passes(cast(Decoder, fake), shares, PrefillSpeed(fake), max_rows, shared_rows)
    return Scheduler(passes, shares, max_running, max_waiting)


@contextmanager
def busy(scheduler: Scheduler) -> Iterator[None]:
    """Keep the scheduler's thread busy inside the ``with`` block: what comes meanwhile waits."""
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert end.wait(60)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(scheduler.call, hold)
        assert begun.wait(60)
        try:
            yield
        finally:
            end.set()
        held.result(60)


def wait_until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Return once a condition holds."""
    end = monotonic() + timeout
    while not condition():
        assert monotonic() < end, "timed out"
        sleep(0.002)

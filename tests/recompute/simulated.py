"""A device that does what was issued to its two streams late, early or in between: in any order that events allow."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from blend.recompute.streams import Event

Name = Literal["compute", "copy"]
Choose = Callable[[Sequence[Name]], Name]
Operation = tuple[Event | None, Callable[[], object]]
"""What has to be done before, and the work."""


def late(name: Name) -> Choose:
    """That stream goes on only when the other one cannot."""
    return lambda able: next((other for other in able if other != name), name)


class SimulatedEvent:
    """Done when its stream has come to it."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self._streams = streams
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._streams.waits += not self.done
        while not self.done:
            self._streams.step()

    def happen(self) -> None:
        self.done = True


class SimulatedStreams:
    """Streams whose work is done when somebody waits for it, and no sooner.

    Args:
        choose: of the streams that can go on, the one that does.
        pinned: whether a tensor lies in memory that the device reads by itself; that of :meth:`staging` does.
        eager: whether the stream that computes never lags behind: for tests where all else is computed at once.

    Attributes:
        waits: how often the host had to wait.
        buffers: the staging buffers that were allocated.
        copies, copies_left: the copies that were issued, and how many of them are not done.
    """

    def __init__(
        self, choose: Choose, pinned: Callable[[Tensor], bool] = lambda _: True, *, eager: bool = False
    ) -> None:
        self._choose = choose
        self._pinned = pinned
        self._eager = eager
        self._queues: dict[Name, deque[Operation]] = {"compute": deque(), "copy": deque()}
        self._current: Name = "compute"
        self.waits = self.copies = self.copies_left = 0
        self.buffers: list[Tensor] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self._current = self._current, "copy"
        try:
            yield
        finally:
            self._current = before

    def record(self) -> Event:
        event = SimulatedEvent(self)
        self._issue(None, event.happen)
        return event

    def wait(self, event: Event) -> None:
        self._issue(event, lambda: None)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert self._current == "copy"
        assert self.reads(source), "the host would have to wait for that"
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert (target.shape, target.dtype) == (source.shape, source.dtype)

        # As a device does, this one keeps an address, which keeps no memory.
        memory, address, nbytes = StorageWeakRef(source.untyped_storage()), source.data_ptr(), source.nbytes

        def work() -> None:
            assert not memory.expired(), "the memory was let go of before it was copied"
            raw = bytearray(ctypes.string_at(address, nbytes))
            target.copy_(torch.frombuffer(raw, dtype=target.dtype).view(target.shape))
            self.copies_left -= 1

        self._issue(None, work)
        self.copies += 1
        self.copies_left += 1

    def reads(self, source: Tensor) -> bool:
        address = source.untyped_storage().data_ptr()
        return any(address == buffer.data_ptr() for buffer in self.buffers) or self._pinned(source)

    def staging(self, nbytes: int) -> Tensor:
        self.buffers.append(torch.full((nbytes,), 0xAB, dtype=torch.uint8))
        return self.buffers[-1]

    def compute(self, work: Callable[[], object]) -> None:
        """Issue work to the stream that computes."""
        assert self._current == "compute"
        self._issue(None, work)

    def step(self) -> None:
        """Do the next thing on one of the streams."""
        able: list[Name] = [name for name in self._queues if self._can(name)]
        assert able, "nothing can go on"
        _, work = self._queues[self._choose(able)].popleft()
        work()

    def run(self, name: Name | None = None) -> None:
        """Do all that a stream can do by itself; without a name, all that there is."""
        while any(self._queues.values()) if name is None else self._can(name):
            if name is None:
                self.step()
            else:
                self._queues[name].popleft()[1]()

    def _can(self, name: Name) -> bool:
        queue = self._queues[name]
        return bool(queue) and (queue[0][0] is None or queue[0][0].query())

    def _issue(self, before: Event | None, work: Callable[[], object]) -> None:
        self._queues[self._current].append((before, work))
        while self._eager and self._queues["compute"]:
            self.step()

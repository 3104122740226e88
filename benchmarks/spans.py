"""Named ranges of time that nest, recorded around calls, and what of each is its own."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from blend.recompute import passes


@dataclass(frozen=True)
class Span:
    """A range: its name, and readings of the clock in nanoseconds."""

    name: str
    start: int
    end: int


class Recorder:
    """Records ranges of one thread. On CUDA each waits for the device at both ends, so that it holds its own work.

    Args:
        device: what the work runs on.

    Attributes:
        spans: what was recorded, in the order in which it ended.
        traced: whether ranges are shown to torch's profiler as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.spans: list[Span] = []
        self.traced = False

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Record what runs inside."""
        with torch.profiler.record_function(name) if self.traced else nullcontext():
            passes.synchronize(self._device)
            start = perf_counter_ns()
            try:
                yield
            finally:
                passes.synchronize(self._device)
                self.spans.append(Span(name, start, perf_counter_ns()))

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, each call of it recorded."""

        @functools.wraps(call)
        def recorded(*args: Any, **named: Any) -> Any:
            with self.range(name):
                return call(*args, **named)

        return recorded


def self_times(spans: Iterable[Span]) -> dict[tuple[str, ...], int]:
    """Nanoseconds of every path of names, from the outermost range inwards, without what lies in ranges within.

    The ranges are of one thread: of two, one lies within the other or behind it. All times together are those of the
    outermost ranges.
    """
    found: Counter[tuple[str, ...]] = Counter()
    around: list[tuple[Span, tuple[str, ...]]] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while around and around[-1][0].end <= span.start:
            around.pop()
        outer = around[-1][1] if around else ()
        if outer:
            found[outer] -= span.end - span.start
        path = (*outer, span.name)
        found[path] += span.end - span.start
        around.append((span, path))
    return dict(found)

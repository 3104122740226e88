"""What work under way asks of the engine: one step after another.

A piece of work is a generator of steps. It stands still until the step that it yielded is done, and goes on in the
engine's thread; what went wrong with the step is raised where it was yielded. So a request's path reads from top to
bottom, and between two of its steps others have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from blend.model.rows import Observer, Rows
from blend.recompute.canvas import Canvas
from blend.serving.sampling import Sampler

T = TypeVar("T")

Steps: TypeAlias = Generator["Step[Any]", None, T]
"""Work that yields steps and returns a ``T``."""

_PENDING = object()


class Step(Generic[T]):
    """One step. Whoever carries it out sets the result and the times.

    Attributes:
        waited_ms: how long it was ready and others had the engine's thread, in milliseconds.
        took_ms: how long it took. A pass that is shared counts in full for each that takes part.
    """

    def __init__(self) -> None:
        self._result: object = _PENDING
        self.waited_ms = 0.0
        self.took_ms = 0.0

    @property
    def result(self) -> T:
        """What came of it, once it is done."""
        if self._result is _PENDING:
            raise RuntimeError("a step was asked for its result before it was done")
        return cast(T, self._result)

    @result.setter
    def result(self, result: T) -> None:
        self._result = result


class Alone(Step[T]):
    """A call in the engine's thread with the model to itself: a selector's probe, a chunk to be encoded.

    Args:
        function: what is called.
        rows: how many rows of a whole pass it comes to, which a tenant is charged with.
    """

    def __init__(self, function: Callable[[], T], rows: float = 0.0) -> None:
        super().__init__()
        self.function = function
        self.rows = rows


class Aside(Step[T]):
    """A call in another thread, for it waits: chunks that come from disk or network. Others compute meanwhile.

    It runs to its end also where its work is cancelled.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self.function = function


class Prefill(Step[Tensor]):
    """Rows of one canvas, computed slice by slice; the result is the last one's logits ``[V]`` float32.

    Slices go in ascending order, so that a later one reads the fresh KV of the earlier ones: the result does not
    depend on how they are cut.

    Args:
        canvas: of the request.
        token_ids: ``[N]`` int64, of the whole prompt.
        positions: ``[R]`` int64, ascending, at least one.
        shared: whether others' rows may be in the same passes. If not, its time is its own.
        observer: sees the rows of every pass.
    """

    def __init__(
        self,
        canvas: Canvas,
        token_ids: Tensor,
        positions: Tensor,
        *,
        shared: bool = True,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        self.canvas = canvas
        self.shared = shared
        self._token_ids = token_ids
        self._positions = positions
        self._observer = observer
        self._done = 0

    @property
    def left(self) -> int:
        """Rows that are still to be computed."""
        return len(self._positions) - self._done

    def rows(self, most: int) -> Rows:
        """Return the next rows, so many at most. They are the next ones until :meth:`passed` says otherwise."""
        part = self._positions[self._done : self._done + most]
        return Rows(self.canvas, part, self._token_ids[part], observer=self._observer)

    def passed(self, rows: int, logits: Tensor) -> bool:
        """Take note that so many of the next rows were computed, and of the last one's logits; returns if all are."""
        self._done += rows
        if self.left:
            return False
        self.result = logits
        return True


class Decode(Step[int]):
    """One row behind a prompt; the result is the token that follows it.

    Args:
        canvas: of the request.
        token: what stands at ``position``.
        position: where.
        sampler: chooses the token that follows.
    """

    def __init__(self, canvas: Canvas, token: int, position: int, sampler: Sampler) -> None:
        super().__init__()
        self.canvas = canvas
        self.sampler = sampler
        self._token = token
        self._position = position

    def rows(self) -> Rows:
        """Return the row."""
        return Rows(self.canvas, torch.tensor([self._position]), torch.tensor([self._token]))


def do(step: Step[T]) -> Steps[T]:
    """Yield one step and return its result."""
    yield step
    return step.result

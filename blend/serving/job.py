"""A piece of work in the engine's hands: whose it is, what it needs, and what becomes of it."""

from __future__ import annotations

import logging
import traceback
from concurrent.futures import Future
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from blend.serving.steps import Decode, Step, Steps

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Room(Protocol):
    """The memory that a request runs in."""

    def take(self, last: bool) -> bool:
        """Take it, if it is there; returns whether it was.

        Raises:
            ResourceExhausted: it is not, and with ``last`` nobody will give any back.
        """

    def give(self) -> None:
        """Give it back."""


class Job(Generic[T]):
    """One piece of work. All but :attr:`done` and :attr:`cancelled` belongs to the engine's thread.

    Args:
        steps: what is to be done.
        tenant: whose it is; tenants have equal shares of the rows.
        room: what has to be taken before it can begin; ``None``: it begins at once.
        deadline: reading of :func:`time.monotonic` at which it ends, whatever it has come to.
        estimate_ms: how long the engine will take until its first token; 0 where that is not known.

    Attributes:
        done: its result, or what was raised.
        cancelled: set by whoever does not want it any more.
        step: what it waits for, once it has begun.
        ready: when that became ready, a reading of :func:`time.perf_counter`.
        interrupted: whether it was told to end.
        order: how many began before it.
    """

    def __init__(
        self,
        steps: Steps[T],
        tenant: str = "",
        *,
        room: Room | None = None,
        deadline: float | None = None,
        estimate_ms: float = 0.0,
    ) -> None:
        self.steps = steps
        self.tenant = tenant
        self.room = room
        self.deadline = deadline
        self.estimate_ms = estimate_ms
        self.done: Future[T] = Future()
        self.cancelled = False
        self.step: Step[Any] | None = None
        self.ready = perf_counter()
        self.interrupted = False
        self.order = 0

    @property
    def decoding(self) -> bool:
        """Whether its first token is out and the next one is wanted."""
        return isinstance(self.step, Decode)

    def advance(self, error: BaseException | None = None) -> bool:
        """Go on to the next step, raising ``error`` at the present one; returns whether there is one.

        Otherwise :attr:`step` is ``None`` and the outcome waits to be told: see :meth:`tell`.
        """
        self.step = None
        try:
            self.step = next(self.steps) if error is None else self.steps.throw(error)
        except StopIteration as end:
            self._outcome: tuple[T | None, BaseException | None] = (end.value, None)
        except BaseException as raised:  # noqa: BLE001 - it is raised again where the outcome is waited for
            _let_go(raised)
            self._outcome = (None, raised)
        finally:
            del error  # its traceback holds this frame
        self.ready = perf_counter()
        return self.step is not None

    def abandon(self, error: BaseException) -> None:
        """End it where it stands, with this error. What its end raises is logged."""
        try:
            self.steps.close()
        except Exception:  # noqa: BLE001 - it has an outcome already
            _log.exception("a piece of work did not end as it should")
        finally:
            self.step, self._outcome = None, (None, error)
            del error

    def tell(self) -> None:
        """Hand the outcome to whoever waits for it."""
        result, error = self._outcome
        del self._outcome
        try:
            if error is not None:
                self.done.set_exception(error)
            else:
                self.done.set_result(result)  # type: ignore[arg-type]
        finally:
            del error


def _let_go(error: BaseException) -> None:
    """Drop what the frames hold that an error was raised in, and those of the errors that it came from.

    The frames of what has ended hold the canvas, and lead to the job, whose outcome holds the error: a cycle that only
    the collector would undo.
    """
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__

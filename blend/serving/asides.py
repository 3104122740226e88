"""Threads for what waits for disk or network, while the engine's thread computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from blend.errors import ResourceExhausted
from blend.serving.steps import Aside

T = TypeVar("T")


class Asides:
    """Carries out steps that wait, side by side. They run to their ends.

    Args:
        most: how many at once; others wait for a thread.
    """

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="blend-load")

    def begin(self, step: Aside[Any], came_back: Callable[[Future[Any]], None]) -> ResourceExhausted | None:
        """Have a thread carry out a step; returns why there is none for it.

        Args:
            step: which.
            came_back: called with what came of it, in the thread that carried it out.
        """
        done: Future[Any] = Future()
        try:
            self._pool.submit(_fulfil, done, step.function)
        except RuntimeError as error:
            # It may be queued all the same, and a thread that has become free may run it.
            if done.cancel():
                return ResourceExhausted(f"no thread can wait for stored chunks: {error}")
        done.add_done_callback(came_back)
        return None

    def close(self, drop: bool = False) -> None:
        """Return once the threads have ended; ``drop``: what has not begun never does."""
        self._pool.shutdown(cancel_futures=drop)


def _fulfil(done: Future[T], function: Callable[[], T]) -> None:
    """Have a future tell what a function returns or raises, unless it was cancelled."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
        done.set_exception(error)

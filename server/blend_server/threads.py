"""Threads for blocking calls of a server on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A few threads of one name for blocking calls. All methods belong to the event loop's thread."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function(*args)`` in one of the threads and return what it returns. Its logs name the caller's call."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, function, *args)

    async def close(self) -> None:
        """Return once the threads have ended."""
        await asyncio.to_thread(self._pool.shutdown)


class Share:
    """Some of a pool's threads, for one of several who use it: what is beyond them waits outside of the pool's queue.

    Belongs to the event loop's thread.

    Args:
        threads: the pool.
        most: how many of its threads may be used at once.
    """

    def __init__(self, threads: Threads, most: int) -> None:
        self._threads = threads
        self._free = asyncio.Semaphore(most)

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function(*args)`` in one of the threads and return what it returns.

        Where the caller is cancelled, the thread counts as used until the function has ended.
        """
        await self._free.acquire()
        task = asyncio.ensure_future(self._threads.call(function, *args))
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._free.release()
        if not task.cancelled():
            task.exception()  # a caller that was cancelled meanwhile has no use for it

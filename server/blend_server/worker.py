"""The thread that runs the engine for a server on an event loop, and the bounded queue before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Generic, TypeVar

from blend.errors import Closed, ResourceExhausted

T = TypeVar("T")

_END = object()


class Worker:
    """Runs blocking calls one after another in one thread, for requests that :meth:`admit` let in.

    A request has at most one call under way, so that the thread's queue is bounded by the number of requests.
    All methods belong to the event loop's thread.

    Args:
        name: the thread's name.
        max_queue: requests that may wait; one more may run.
    """

    def __init__(self, name: str, max_queue: int) -> None:
        self.max_queue = max_queue
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._requests = 0
        self._closed = False

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self._requests

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one request's place in the queue.

        Raises:
            ResourceExhausted: the queue is full.
            Closed: the worker was closed.
        """
        if self._closed:
            raise Closed("the server is shutting down")
        if self._requests > self.max_queue:
            raise ResourceExhausted(f"{self.max_queue} requests wait for the engine already; try again later")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function(*args)`` in the thread and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def stream(self, items: Iterator[T]) -> Stream[T]:
        """Draw ``items`` in the thread; they come out of the returned stream."""
        return Stream(items, self._pool)

    async def close(self) -> None:
        """Refuse new requests and return once the thread has ended; calls that have not begun are dropped."""
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)


class Stream(Generic[T]):
    """The items of an iterator that runs in another thread, as an asynchronous iterator.

    It never waits for whoever reads the items. :meth:`cancel` closes it at its next item, or before it begins.
    What it raises comes out of the iteration.
    """

    def __init__(self, items: Iterator[T], pool: ThreadPoolExecutor) -> None:
        self.waited_ms = 0.0
        """How long the iterator waited for the thread, in milliseconds."""
        self._items = items
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[object] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._submitted = perf_counter()
        self._job = self._loop.run_in_executor(pool, self._produce)
        self._job.add_done_callback(self._finish)

    def _produce(self) -> None:
        self.waited_ms = (perf_counter() - self._submitted) * 1e3
        try:
            while not self._cancelled.is_set():
                item = next(self._items, _END)
                if item is _END:
                    return
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        finally:
            if isinstance(self._items, Generator):
                self._items.close()

    def _finish(self, job: asyncio.Future[None]) -> None:
        if not job.cancelled():
            job.exception()  # whoever iterates gets it; a request that was cancelled meanwhile has no use for it
        self._queue.put_nowait(_END)

    def cancel(self) -> None:
        """End the iterator at its next item."""
        self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[T]:
        try:
            while (item := await self._queue.get()) is not _END:
                yield item  # type: ignore[misc]
            await self._job
        finally:
            self.cancel()

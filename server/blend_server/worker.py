"""The threads that run blocking calls for a server on an event loop, and the bounded queue before the engine's."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from time import perf_counter
from typing import Generic, TypeVar

from blend.errors import Closed, ResourceExhausted
from blend.serving.stream import AnswerStream
from blend.types import Answer, Token
from blend_server.places import RETRY_SECONDS

T = TypeVar("T")

_END = object()

# Answers of an engine that hands them out as iterators that wait.
_STREAMS_AT_ONCE = 8


class Worker:
    """Runs the engine for requests that :meth:`admit` let in: calls one after another, streams side by side.

    A request has at most one call or stream under way, so that what waits for a thread is bounded by the number of
    requests. All methods belong to the event loop's thread.

    Args:
        name: the name of the thread for calls; those for streams are called ``name-stream``.
        max_queue: requests that may wait for the engine; one more may have it.
        streams: most streams that run at once; others wait for a thread.
    """

    def __init__(self, name: str, max_queue: int, streams: int = _STREAMS_AT_ONCE) -> None:
        self.max_queue = max_queue
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._streams = ThreadPoolExecutor(streams, thread_name_prefix=f"{name}-stream")
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
            raise ResourceExhausted(
                f"{self.max_queue} requests wait for the engine already; try again later", RETRY_SECONDS
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function(*args)`` behind all calls before it and return what it returns, as :class:`Threads` do."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, copy_context().run, function, *args)

    def stream(self, answer: Iterator[Token | Answer]) -> AnswerEvents | Stream[Token | Answer]:
        """Return an answer's events. An iterator that waits is drawn in a thread; the native engine's needs none."""
        return AnswerEvents(answer) if isinstance(answer, AnswerStream) else Stream(answer, self._streams)

    async def close(self) -> None:
        """Refuse new requests and return once the threads have ended; what has not begun is dropped."""
        self._closed = True
        for pool in (self._streams, self._calls):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)


class AnswerEvents:
    """The events of an answer of the native engine as they come, as an asynchronous iterator.

    Ending the iteration, or :meth:`cancel`, ends the generation.
    """

    waited_ms = 0.0
    """It waits for no thread; what it waits for the engine is in its report."""

    def __init__(self, answer: AnswerStream) -> None:
        self._answer = answer
        self._events: deque[Token | Answer] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done once nothing more will come from the engine, whether or not anybody has read what came."""
        answer.on_change(self._tell)

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        try:
            while found := self._answer.take():  # what ended the answer comes after its last event
                self._events.extend(found)
        except BaseException as error:  # noqa: BLE001 - whoever iterates gets it
            self._error = error
        if self._answer.over and not self.ended.done():
            self.ended.set_result(None)
        self._changed.set()

    def cancel(self) -> None:
        """End the generation at its next step."""
        self._answer.close()
        self._events.clear()
        self._take()

    async def __aiter__(self) -> AsyncGenerator[Token | Answer, None]:
        try:
            while True:
                while self._events:
                    yield self._events.popleft()
                if self.ended.done():
                    break
                await self._changed.wait()
                self._changed.clear()
            if self._error is not None:
                raise self._error
        finally:
            self._error = None
            self.cancel()


class Stream(Generic[T]):
    """The items of an iterator that runs in another thread, as an asynchronous iterator.

    It never waits for whoever reads the items. :meth:`cancel` closes it at its next item, or before it begins.
    What it raises comes out of the iteration.
    """

    def __init__(self, items: Iterator[T], pool: ThreadPoolExecutor) -> None:
        self.waited_ms = 0.0
        """How long the iterator waited for a thread, in milliseconds."""
        self._items = items
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[object] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._submitted = perf_counter()
        self._job = self._loop.run_in_executor(pool, self._produce)
        self._job.add_done_callback(self._finish)
        self.ended: asyncio.Future[None] = self._job
        """Done once nothing more will come from the iterator, whether or not anybody has read what came."""

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

"""An answer's tokens on their way from the engine's thread to whoever reads them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from blend.serving.job import Job
from blend.types import Answer, Token


class Channel:
    """The engine's end. It never waits: what nobody reads is kept, and that is no more than an answer's tokens.

    Args:
        count: called for every token.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._events: deque[Token | Answer] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._tell: Callable[[], None] | None = None

    def put(self, token: Token) -> None:
        """Add a token."""
        self._count()
        self._add(token)

    def end(self, outcome: Future[Answer]) -> None:
        """Add the last event, or what was raised instead."""
        error = outcome.exception()
        self._add(None if error is not None else outcome.result(), error, ended=True)

    def on_change(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called now and whenever there is something to take."""
        with self._changed:
            self._tell = tell
        tell()

    def take(self, wait: bool) -> tuple[list[Token | Answer], bool]:
        """Return all events that there are, and whether they are the last; with ``wait`` as soon as there are any.

        Raises:
            BaseException: what ended the answer, once everything before it was taken.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: bool(self._events) or self._ended)
            events = list(self._events)
            self._events.clear()
            if events or self._error is None:
                return events, self._ended and self._error is None
            error, self._error = self._error, None
        try:
            raise error
        finally:
            del error

    def _add(self, event: Token | Answer | None, error: BaseException | None = None, ended: bool = False) -> None:
        with self._changed:
            if event is not None:
                self._events.append(event)
            self._error, self._ended = error, ended
            tell = self._tell
            self._changed.notify_all()
        if tell is not None:
            tell()


class AnswerStream(Iterator["Token | Answer"]):
    """An answer as it is generated: its tokens, last the :class:`~blend.types.Answer`. Also a context manager.

    It is generated whether or not anybody reads it, and holds no more than its tokens when it is done. Iterating
    waits for the next event and raises what ended the answer; :meth:`take` does not wait, for event loops. To be read
    by one thread at a time. One that is dropped is closed.

    Args:
        channel: where events come from.
        job: what generates them.
        cancel: has a job that is cancelled end soon.
    """

    def __init__(self, channel: Channel, job: Job[Answer], cancel: Callable[[Job[Any]], None]) -> None:
        self._channel = channel
        self._job = job
        self._cancel_job = cancel
        self._events: deque[Token | Answer] = deque()
        self._over = False

    def __next__(self) -> Token | Answer:
        if not self._events:
            self._events.extend(self._taken(wait=True))
        if not self._events:
            raise StopIteration
        return self._events.popleft()

    def take(self) -> list[Token | Answer]:
        """Return the events that have come since the last call; with none left, raises what ended the answer."""
        events = [*self._events, *self._taken(wait=False)]
        self._events.clear()
        return events

    @property
    def over(self) -> bool:
        """Whether everything was taken that will ever come."""
        return self._over and not self._events

    def on_change(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called now, and from the engine's thread whenever there is something to take.

        It must neither wait nor raise.
        """
        self._channel.on_change(tell)

    def cancel(self) -> None:
        """End the generation at its next step. The stream ends with what there is by then: an answer that says so.

        Without a first token there is none, and :class:`~blend.errors.Cancelled` is raised.
        """
        self._cancel_job(self._job)

    def close(self) -> None:
        """End the generation at its next step, and the stream now. Safe to call again."""
        if not self._over:
            self._over = True
            self.cancel()
        self._events.clear()

    def _taken(self, wait: bool) -> list[Token | Answer]:
        if self._over:
            return []
        try:
            events, self._over = self._channel.take(wait)
        except BaseException:
            self._over = True
            raise
        return events

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Wherever the collector runs this: nothing here may wait, so the engine learns of it at its next step.
        if not getattr(self, "_over", True):
            self._job.cancelled = True

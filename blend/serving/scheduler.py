"""The engine's thread: it carries out the steps of all work under way, in passes that they share."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic, perf_counter
from typing import Any, TypeVar

from blend.errors import BlendError, Cancelled, Closed, DeadlineExceeded
from blend.serving.asides import Asides
from blend.serving.background import Gaps
from blend.serving.demand import Demand, check_deadline
from blend.serving.job import Job, Room
from blend.serving.passes import Part, Passes
from blend.serving.shares import Shares, Waiting
from blend.serving.steps import Alone, Aside, Steps

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Scheduler:
    """Runs requests together, and background work in their gaps.

    In each round one step that wants the model to itself is carried out, if there is one, then one pass over a row of
    every request that decodes and a slice of the prompts. Background work goes when no request is under way, or when
    it has waited long enough. A request begins when there are memory and a place for it; until then it waits.

    Args:
        passes: puts passes together and runs them.
        shares: who has had how much of them.
        max_running: most requests under way.
        max_waiting: most requests that wait to begin.
    """

    def __init__(self, passes: Passes, shares: Shares, max_running: int, max_waiting: int) -> None:
        self._passes = passes
        self._shares = shares
        self._max_running = max_running
        self._queue = Waiting(shares)
        self._running: list[Job[Any]] = []
        self._gaps = Gaps()
        self._demand = Demand(max_waiting)
        self._begun = 0
        self._freed = False  # whether something has ended since requests were last had begin
        self._changed = threading.Condition()  # guards what follows; the rest is the thread's own
        self._news: deque[Callable[[], None]] = deque()
        self._closed = False
        self._failure: str | None = None
        self._jobs = weakref.WeakSet[Job[Any]]()
        self._asides = Asides(max_running)
        self._thread = threading.Thread(target=self._run, name="blend-compute", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------- from any thread

    @property
    def alive(self) -> bool:
        """Whether work is taken: it was not closed, and its thread has not failed."""
        with self._changed:
            return not self._closed

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return self._demand.waiting

    @property
    def running(self) -> int:
        """Requests that have begun and are not over."""
        return self._demand.running

    @property
    def crowded(self) -> bool:
        """Whether more than one request waits or is under way."""
        return self._demand.present > 1

    def backlog_ms(self) -> float:
        """Return how long it will take until every request here has its first token, as far as that is known."""
        return self._demand.backlog_ms()

    def submit(self, job: Job[T]) -> Job[T]:
        """Take a job. One that needs room is a request, and waits for its turn to begin; any other begins at once.

        Raises:
            Closed: the scheduler was closed.
            DeadlineExceeded: the job's deadline would pass before its first token.
            ResourceExhausted: too many wait already.
        """
        check_deadline(job, self._demand.until_begun_ms(job))
        with self._changed:
            self._check_open()
            if job.room is not None:
                self._demand.enter(job)
            self._jobs.add(job)
            self._post(lambda: self._arrive(job))
        return job

    def submit_background(self, job: Job[T], patience: float) -> Job[T]:
        """Take a job for the gaps between requests; each of its pieces waits so many seconds for one at most.

        It may have no steps but :class:`~blend.serving.steps.Alone`, a piece each, and
        :class:`~blend.serving.steps.Prefill`, a piece a slice. One with room ends with
        :class:`~blend.errors.ResourceExhausted` where there is none, or a request needs it.

        Raises:
            Closed: the scheduler was closed.
        """
        with self._changed:
            self._check_open()
            self._jobs.add(job)
            self._post(lambda: self._gaps.push(job, patience))
        return job

    def wait(self, job: Job[T]) -> T:
        """Return a job's result, or raise its error. Whoever is interrupted meanwhile does not want it any more."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine's own thread cannot wait for the engine")
        try:
            return job.done.result()
        finally:
            if not job.done.done():
                self.cancel(job)

    def cancel(self, job: Job[Any]) -> None:
        """End a job at its next step, if it has not ended."""
        job.cancelled = True
        with self._changed:
            self._changed.notify_all()

    def call(self, function: Callable[[], T], tenant: str = "") -> T:
        """Run ``function`` in the engine's thread, between two steps of others, and return what it returns."""
        return self.wait(self.submit(Job(_only(Alone(function)), tenant)))

    def close(self) -> None:
        """Let the running step finish and end all work, and the thread, with :class:`~blend.errors.Closed`.

        What waits for disk or network goes on until that is over: see :meth:`join`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def join(self) -> None:
        """Return once everything has ended, after :meth:`close` and once nothing is to be waited for any more."""
        self._asides.close()
        for job in [*self._running]:
            self._end(job, self._why_closed())

    def _check_open(self) -> None:
        if self._closed:
            raise self._why_closed()

    def _why_closed(self) -> Closed:
        return Closed("the engine is closed" if self._failure is None else f"the engine has failed: {self._failure}")

    def _post(self, news: Callable[[], None]) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            while self._listen():
                self._round()
            self._listen()  # what came in last
            self._end_all()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the work
            _log.exception("the engine's thread ends")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End all work, for this thread cannot go on. What another thread has in hand is waited for."""
        with self._changed:
            # Its message may quote what one tenant's request is about, and all of them are told.
            self._closed, self._failure = True, type(error).__name__
            lost = [job for job in self._jobs if not job.done.done()]
            self._news.clear()
            self._demand.clear()
        self._running.clear()
        aside = [job for job in lost if isinstance(job.step, Aside)]
        for job in [job for job in lost if job not in aside]:
            self._hand_back(job, self._why_closed())
        self._asides.close(drop=True)
        for job in aside:
            self._hand_back(job, self._why_closed())

    def _hand_back(self, job: Job[Any], error: BaseException | None) -> None:
        """Give back what a job holds, and tell what came of it, or this error."""
        if error is not None:
            job.abandon(error)
        if job.room is not None:
            job.room.give()
        job.tell()

    def _listen(self) -> bool:
        """Wait until there is something to do, and take in what has come; returns False once it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._news) or self._seconds() == 0.0, self._seconds())
            news, closed = list(self._news), self._closed
            self._news.clear()
        for one in news:
            one()
        return not closed

    def _seconds(self) -> float | None:
        """After how many seconds there will be something to do; ``None``: when something comes in."""
        waiting = [*self._queue]
        if self._freed and waiting:
            return 0.0
        jobs = [job for job in (*self._running, *waiting) if not job.interrupted]
        ready = (job.step is not None and not isinstance(job.step, Aside) for job in self._running)
        if any(ready) or any(job.cancelled for job in jobs):
            return 0.0
        deadlines = (max(0.0, job.deadline - monotonic()) for job in jobs if job.deadline is not None)
        soonest = min((self._gaps.seconds(self._idle), *deadlines))
        return None if soonest == math.inf else soonest

    @property
    def _idle(self) -> bool:
        """Whether no request waits or is under way."""
        return not self._demand.present

    def _round(self) -> None:
        self._interrupt()
        self._begin()
        if (job := self._passes.alone(self._running)) is not None:
            if isinstance(job.step, Alone):
                self._shares.charge(job.tenant, job.step.rows)
                self._go_on(job, self._passes.call(job))
            else:
                self._share([self._passes.next_slice(job, self._running)])
        if parts := self._passes.gather(self._running):
            self._share(parts)
        idle = self._idle
        if not self._gaps.seconds(idle):
            self._gaps.work(self._passes.piece, idle)

    def _share(self, parts: list[Part]) -> None:
        for job, error in self._passes.run(parts):
            self._go_on(job, error)

    def _arrive(self, job: Job[Any]) -> None:
        self._shares.enter(job.tenant)
        if job.room is not None:
            self._queue.push(job)
        else:
            self._start(job)

    def _begin(self) -> None:
        """Have requests begin for which there are a place and memory."""
        self._freed = False
        while (job := self._queue.first(self._running)) is not None:
            holding = [other for other in self._running if other.room is not None]
            if len(holding) >= self._max_running:
                return
            assert job.room is not None
            try:
                check_deadline(job, 0.0)
                if not self._take(job.room, last=not holding):
                    return
            except Exception as error:  # noqa: BLE001 - it belongs to the request that room was taken for
                self._leave_queue(job)
                self._end(job, error)
            else:
                self._leave_queue(job)
                self._start(job)

    def _take(self, room: Room, last: bool) -> bool:
        """Take a request's memory, if it is there once work in the background has given way."""
        return room.take(last and not self._gaps.holding) or (self._gaps.give_way() and room.take(last))

    def _leave_queue(self, job: Job[Any]) -> None:
        """Take a request out of the queue; unless it begins now, it has no room to give back."""
        self._queue.remove(job)
        self._demand.leave_queue()

    def _start(self, job: Job[Any]) -> None:
        job.order = self._begun
        self._begun += 1
        self._running.append(job)
        self._go_on(job)

    def _go_on(self, job: Job[Any], error: BaseException | None = None) -> None:
        """Have a job go on after its step, or end."""
        if not job.advance(error):
            self._end(job)
            return
        if job.interrupted:
            self._end(job, Cancelled("the request had been told to end"))
        elif isinstance(job.step, Aside):
            if (refused := self._asides.begin(job.step, lambda done: self._came_back(job, done))) is not None:
                self._go_on(job, refused)
        elif job.decoding:
            self._demand.first_token(job)

    def _came_back(self, job: Job[Any], done: Future[Any]) -> None:
        """A step in another thread is over."""
        self._post(lambda: self._take_back(job, done))

    def _take_back(self, job: Job[Any], done: Future[Any]) -> None:
        """Have a job go on, or end, after its step in another thread."""
        assert job.step is not None
        error = done.exception()
        if error is None:
            job.step.result = done.result()
        job.step.took_ms = (perf_counter() - job.ready) * 1e3
        if job.interrupted or job.cancelled:
            self._end(job, self._why(job))
        else:
            self._go_on(job, error)

    def _interrupt(self) -> None:
        """End what was cancelled, and what is past its deadline."""
        now = monotonic()
        for job in [*self._queue, *self._running]:
            late = job.deadline is not None and job.deadline <= now
            if job.interrupted or not (job.cancelled or late):
                continue
            job.interrupted = True
            if job.step is None:  # it has not begun
                self._leave_queue(job)
                self._end(job, self._why(job))
            elif not isinstance(job.step, Aside):  # that one ends when it comes back
                self._go_on(job, self._why(job))

    def _why(self, job: Job[Any]) -> BlendError:
        return Cancelled("the request was cancelled") if job.cancelled else DeadlineExceeded("the deadline has passed")

    def _end(self, job: Job[Any], error: BaseException | None = None) -> None:
        """A job is over, by itself or with an error from here."""
        if job in self._running:
            self._running.remove(job)
        self._freed = True
        self._shares.leave(job.tenant)
        self._demand.leave(job)
        self._hand_back(job, error)

    def _end_all(self) -> None:
        for job in list(self._queue):
            self._leave_queue(job)
            self._end(job, self._why_closed())
        for job in [job for job in self._running if not isinstance(job.step, Aside)]:
            self._end(job, self._why_closed())
        self._gaps.end(self._why_closed())


def _only(step: Alone[T]) -> Steps[T]:
    yield step
    return step.result

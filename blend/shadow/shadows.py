"""Full prefills of prompts that were answered already, in the gaps between requests."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from blend.config import ShadowConfig
from blend.errors import Cancelled, Closed, ResourceExhausted
from blend.pipeline import State
from blend.serving.job import Job, Room
from blend.serving.scheduler import Scheduler
from blend.serving.steps import Steps
from blend.shadow.choice import EvenShare
from blend.shadow.quality import Quality
from blend.stats import ShadowStats
from blend.types import EXACT_METHODS, Comparison, Plan, Report

_log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that a slice waits for a gap: where requests are always under way, one slips in so often."""


@dataclass(frozen=True, eq=False)
class _Sample:
    """A request to be compared: ``logits`` ``[V]`` are those that its first token was chosen by."""

    request_id: str
    method: str
    era: int
    token_ids: torch.Tensor
    logits: torch.Tensor


class Shadows:
    """Compares a share of the blended requests with full prefill, one after another, once they are answered.

    It holds no more than the backlog of prompts with a row of logits each, and one prompt's canvas. What does not fit
    into the backlog is dropped, and so is what there is no memory for, or a request needs that of. Thread-safe but for
    :meth:`offer`.

    Args:
        config: which requests, and how many may wait.
        scheduler: owns the engine's thread.
        compare: the steps of one comparison, from token ids ``[N]`` and logits ``[V]``.
        room: returns the memory for a prompt of so many tokens.
        quality: told of every comparison.
    """

    def __init__(
        self,
        config: ShadowConfig,
        scheduler: Scheduler,
        compare: Callable[[torch.Tensor, torch.Tensor], Steps[Comparison]],
        room: Callable[[int], Room],
        quality: Quality,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._compare = compare
        self._room = room
        self._quality = quality
        self._choice = EvenShare(config.share, config.seed)
        self._changed = threading.Condition()
        self._queue: deque[_Sample] = deque()
        self._running = False
        self._closed = False
        self._run = 0
        self._failed = 0
        self._dropped = 0

    def offer(self, state: State, report: Report) -> None:
        """Take a request that was answered; in the engine's thread.

        What was computed at full prefill has nothing to be compared. What was compared on demand is not run again; like
        any other request it counts where it was chosen, for whoever asks must not choose what stops ``auto``.
        """
        if report.mode in EXACT_METHODS or not report.cached:
            return
        request, chosen = state.request, self._choice.next()
        if not chosen:
            return
        method, era = _label(request.plan), self._quality.era
        if report.comparison is not None:
            self._quality.take(request.id, method, report.tokens, report.comparison, era)
            return
        with self._changed:
            if self._closed or len(self._queue) >= self._config.backlog:
                self._drop(1)
                return
            self._queue.append(_Sample(request.id, method, era, state.token_ids, state.logits))
        self._next()

    def stats(self) -> ShadowStats:
        """Return what was compared, and what came of it."""
        trip = self._quality.trip
        with self._changed:
            return ShadowStats(
                share=self._config.share,
                max_kl=self._config.max_kl,
                run=self._run,
                failed=self._failed,
                dropped=self._dropped,
                pending=len(self._queue) + self._running,
                broken=self._quality.broken,
                methods=self._quality.methods(),
                tripped=trip is not None,
                since=None if trip is None else trip.since,
                reason="" if trip is None else trip.reason,
            )

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to compare (``timeout`` in seconds); returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self._queue, timeout)

    def close(self) -> None:
        """Drop what waits, and take no more. What is being compared goes on."""
        with self._changed:
            self._closed = True
            self._drop_all()

    def _next(self) -> None:
        """Have the next one compared, unless one is."""
        with self._changed:
            if self._running or not self._queue:
                return
            sample, self._running = self._queue.popleft(), True
        steps = self._compare(sample.token_ids, sample.logits)
        job = Job(steps, room=self._room(len(sample.token_ids)))
        job.done.add_done_callback(lambda done: self._over(sample, done))
        try:
            self._scheduler.submit_background(job, PATIENCE)
        except Closed as error:
            job.abandon(error)
            job.tell()

    def _over(self, sample: _Sample, done: Future[Comparison]) -> None:
        """A comparison has ended, one way or another."""
        error = done.exception()
        if error is None:
            self._quality.take(sample.request_id, sample.method, len(sample.token_ids), done.result(), sample.era)
        elif not isinstance(error, (Cancelled, Closed, ResourceExhausted)):
            _log.error("event=compare_failed request_id=%s", sample.request_id, exc_info=error)
        with self._changed:
            self._running = False
            if error is None:
                self._run += 1
            elif isinstance(error, (Cancelled, Closed, ResourceExhausted)):
                self._drop(1)
            else:
                self._failed += 1
            if isinstance(error, Closed):
                self._drop_all()
            self._changed.notify_all()
        self._next()

    def _drop_all(self) -> None:
        self._drop(len(self._queue))
        self._queue.clear()
        self._changed.notify_all()

    def _drop(self, count: int) -> None:
        self._dropped += count


def _label(plan: Plan) -> str:
    """What a plan's requests are counted as: its method, and ``auto_limited`` for ``auto`` within limits of its own."""
    limited = plan.method == "auto" and not (plan.max_kl is None and plan.max_charged is None)
    return "auto_limited" if limited else plan.method

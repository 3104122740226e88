"""Forward passes that jobs share: which rows go into the next one, and who gets what of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from blend.model.decoder import Decoder
from blend.model.rows import Rows
from blend.recompute.cost import Work
from blend.recompute.passes import synchronize, unstopped
from blend.recompute.planner import PrefillSpeed
from blend.serving import sampling
from blend.serving.job import Job
from blend.serving.shares import Shares
from blend.serving.steps import Alone, Decode, Prefill

CPU_ROWS, GPU_ROWS = 256, 2048
"""Rows of prompts in a pass that others share, by default: from so many on a pass of twice as many takes twice as long,
and who decodes waits for it."""

_GAP_PART = 4
"""A slice in the background has a quarter of the rows: nobody waits for it, and a request that comes meanwhile does."""


@dataclass(frozen=True)
class Part:
    """So many rows of one job in a pass: the next ones of its step. ``charged``: they come off its tenant's share."""

    job: Job[Any]
    rows: int
    charged: bool = True

    @property
    def step(self) -> Decode | Prefill:
        """What they are rows of."""
        assert isinstance(self.job.step, (Decode, Prefill))
        return self.job.step

    def next_rows(self) -> Rows:
        """Return them."""
        return self.step.rows() if isinstance(self.step, Decode) else self.step.rows(self.rows)


class Passes:
    """Puts passes together and runs them.

    Args:
        decoder: the model.
        shares: who has had how much.
        speed: learns how fast passes are.
        max_rows: most rows of one pass.
        shared_rows: most rows of prompts in a pass where somebody else waits for it; ``None``: what suits the device.
    """

    def __init__(
        self, decoder: Decoder, shares: Shares, speed: PrefillSpeed, max_rows: int, shared_rows: int | None
    ) -> None:
        self._decoder = decoder
        self._shares = shares
        self._speed = speed
        self._max_rows = max_rows
        default = GPU_ROWS if decoder.device.type == "cuda" else CPU_ROWS
        self._shared_rows = min(max_rows, default if shared_rows is None else shared_rows)

    def alone(self, jobs: Sequence[Job[Any]]) -> Job[Any] | None:
        """Return the job whose step is to have the model to itself next, unless others' rows come first."""
        room = self._shared_rows
        for job in self._shares.order(job for job in jobs if isinstance(job.step, (Alone, Prefill))):
            if room <= 0:
                return None
            if not isinstance(job.step, Prefill) or not job.step.shared:
                return job
            room -= job.step.left
        return None

    def gather(self, jobs: Sequence[Job[Any]]) -> list[Part]:
        """Return the next pass: a row of each job that decodes, and a bounded slice of prompts, fairly chosen."""
        decoding = sorted((job for job in jobs if job.decoding), key=lambda job: job.ready)
        shared = [job for job in jobs if isinstance(job.step, Prefill) and job.step.shared]
        # Where more decode than a pass has rows, those that have waited longest; one row is left for prompts.
        decoding = decoding[: self._max_rows - (bool(shared) and self._max_rows > 1)]
        parts = [Part(job, 1) for job in decoding]
        room = self._slice(jobs) if shared else 0
        room = min(room, self._max_rows - len(parts))
        for job in self._shares.order(shared):
            if room <= 0:
                break
            assert isinstance(job.step, Prefill)
            parts.append(Part(job, min(room, job.step.left)))
            room -= parts[-1].rows
        return parts

    def next_slice(self, job: Job[Any], jobs: Sequence[Job[Any]]) -> Part:
        """Return the next slice of a prompt that shares its passes with nobody."""
        assert isinstance(job.step, Prefill)
        return Part(job, min(self._slice(jobs), job.step.left))

    def _slice(self, jobs: Sequence[Job[Any]]) -> int:
        """How many rows of prompts a pass may have: few where somebody waits for it who is not in it."""
        wanting = sum(isinstance(job.step, (Alone, Prefill, Decode)) for job in jobs)
        return self._shared_rows if wanting > 1 else self._max_rows

    def run(self, parts: list[Part]) -> list[tuple[Job[Any], BaseException | None]]:
        """Run one pass; returns the jobs whose step it ended, and what went wrong with it where something did.

        Where several jobs' rows fail together, each goes by itself, so that only the one at fault fails. ``parts`` is
        empty afterwards: from an error's frames others lead to whoever called this, and they would hold the canvases.
        """
        begin = perf_counter()
        found, error = self._forward(parts, begin)
        took_ms = (perf_counter() - begin) * 1e3
        if error is not None and len(parts) > 1:
            del error
            each = [[part] for part in parts]
            parts.clear()
            return [ended for one in each for ended in self.run(one)]
        jobs = [part.job for part in parts if self._over(part, begin, took_ms, found.get(part.job), error)]
        parts.clear()
        return [(job, error) for job in jobs]

    def _over(
        self, part: Part, begin: float, took_ms: float, found: int | Tensor | None, error: BaseException | None
    ) -> bool:
        """Take note of one job's part in a pass that is over; returns whether its step is."""
        step = part.step
        step.waited_ms += (begin - part.job.ready) * 1e3
        step.took_ms += took_ms
        part.job.ready = begin + took_ms / 1e3
        if error is not None:
            return True
        if part.charged:
            self._shares.charge(part.job.tenant, part.rows)
        if isinstance(step, Prefill):
            assert isinstance(found, Tensor)
            return step.passed(part.rows, found)
        assert isinstance(found, int)
        step.result = found
        step.sampler.taken()
        return True

    def _forward(
        self, parts: Sequence[Part], begin: float
    ) -> tuple[dict[Job[Any], int | Tensor], BaseException | None]:
        """What each job gets of a pass: the next token where it decodes, else logits ``[V]``; or what was raised."""
        try:
            filled = sum(part.step.canvas.fill_ms for part in parts)
            rows = [part.next_rows() for part in parts]
            logits = unstopped(self._decoder.forward(rows))
            steps = {number: part.step for number, part in enumerate(parts)}
            samplers = {number: step.sampler for number, step in steps.items() if isinstance(step, Decode)}
            chosen = sampling.choose(logits[list(samplers)], list(samplers.values())) if samplers else []
            synchronize(self._decoder.device)
            found: dict[Job[Any], int | Tensor] = {
                parts[number].job: token for number, token in zip(samplers, chosen, strict=True)
            }
            took_ms = (perf_counter() - begin) * 1e3
            filled = sum(part.step.canvas.fill_ms for part in parts) - filled
            count = sum(len(one.at) for one in rows)
            self._speed.passed(Work(count, sum(sum(one.at.tolist()) for one in rows) + count), took_ms - filled)
            for number in steps.keys() - samplers.keys():
                # A copy of its own: what a request keeps would hold the others' logits too.
                found[parts[number].job] = logits[number] if len(parts) == 1 else logits[number].clone()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever wanted these rows
            return {}, error
        return found, None

    def piece(self, job: Job[Any]) -> tuple[bool, BaseException | None]:
        """Carry out the next piece of work in the background: a call, or a slice of a prompt that is soon over.

        Returns whether its step is over, and what was raised.
        """
        if isinstance(job.step, Prefill):
            rows = max(1, self._shared_rows // _GAP_PART)
            ended = self.run([Part(job, min(rows, job.step.left), charged=False)])
            return (True, ended[0][1]) if ended else (False, None)
        return True, self.call(job)

    def call(self, job: Job[Any]) -> BaseException | None:
        """Carry out a step that has the model to itself; returns what was raised."""
        step = job.step
        assert isinstance(step, Alone)
        begin = perf_counter()
        error: BaseException | None = None
        try:
            step.result = step.function()
            synchronize(self._decoder.device)
        except BaseException as raised:  # noqa: BLE001 - it belongs to whoever wanted this
            error = raised
        step.waited_ms += (begin - job.ready) * 1e3
        step.took_ms += (perf_counter() - begin) * 1e3
        try:
            return error
        finally:
            del error

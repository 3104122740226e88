"""What is refused before anything runs: prompts, plans and token ids that the model cannot take, or memory cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

from blend import memory
from blend.chunks import ChunkCache
from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong, ResourceExhausted
from blend.model.decoder import Decoder
from blend.pipeline import Request
from blend.recompute import planner
from blend.recompute.calibration import Calibration
from blend.recompute.kept import KEPT
from blend.recompute.scratch import Need, Scratch
from blend.stats import ScratchStats
from blend.types import Plan, Prompt


class Admission:
    """Makes requests of what callers give, or says what is wrong with it.

    Args:
        decoder: the model that requests are for.
        chunks: its chunks in the store.
        calibration: what ``auto`` goes by, or ``None``.
        scratch: what prefills take of the device's memory.
    """

    def __init__(self, decoder: Decoder, chunks: ChunkCache, calibration: Calibration | None, scratch: Scratch) -> None:
        self._decoder = decoder
        self._chunks = chunks
        self._calibration = calibration
        self._scratch = scratch
        self._lock = threading.Lock()
        self._largest = self._passing = 0

    def admit(
        self,
        prompt: Prompt,
        plan: Plan | None,
        namespace: str,
        reserve: int,
        arrived: float | None = None,
        compared: bool = False,
    ) -> Request:
        """Return the request for a prompt.

        Args:
            plan: ``None`` is ``Plan()``.
            reserve: tokens that the canvas is to have room for beyond the prompt.
            arrived: reading of :func:`time.perf_counter` that TTFT counts from; ``None`` is now.
            compared: whether the prompt is run at full prefill, too.

        Raises:
            InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong: it cannot run.
            ResourceExhausted: the device has not the memory for it now.
        """
        arrived = perf_counter() if arrived is None else arrived
        if not isinstance(prompt, Prompt):
            raise InvalidPrompt("prompt", prompt, "a Prompt")
        self.check_ids("prompt", prompt.token_ids)
        plan = Plan() if plan is None else plan
        if not isinstance(plan, Plan):
            raise InvalidPlan("plan", plan, "a Plan")
        if not isinstance(reserve, int) or isinstance(reserve, bool) or reserve < 0:
            raise InvalidInput("reserve", reserve, "an integer of 0 or more")
        planner.decide(plan, self._calibration)
        self._chunks.namespace(namespace)
        capacity, most = len(prompt) + reserve, self._decoder.max_positions
        if capacity > most:
            raise PromptTooLong(capacity, most, "prompt with room for its answer")
        request = Request(prompt, plan, namespace, capacity, arrived, compared=compared)
        need = self._need(request)
        with self._lock:
            passing = self._passing
        self._refuse(request, need, passing)
        with self._lock:
            self._largest = max(self._largest, need.total)
        return request

    def check_ids(self, what: str, ids: Sequence[int]) -> None:
        """Check token ids against the model's vocabulary; ``what`` names them.

        Raises:
            InvalidPrompt: there are none, or one is not in the vocabulary.
        """
        if not ids:
            raise InvalidPrompt(what, "no tokens", "at least one token id")
        size = self._decoder.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidPrompt(what, wrong, f"token ids from 0 to {size - 1}")

    @contextmanager
    def running(self, request: Request) -> Iterator[None]:
        """Within it a request is prefilled, the only one at that time.

        When it arrived, others may have held less than now; and while it runs, those that arrive are not refused for
        what it gives back before their turns come: all but its canvas.

        Raises:
            ResourceExhausted: the device has not the memory for it any more.
        """
        need = self._need(request)
        self._refuse(request, need)
        with self._lock:
            self._passing = need.total - need.canvas
        try:
            yield
        finally:
            with self._lock:
                self._passing = 0

    def _need(self, request: Request) -> Need:
        """What a request takes of the device's memory at most."""
        tokens = len(request.prompt)
        need = self._scratch.need(request.capacity, tokens)
        return replace(need, canvas=need.canvas + self._scratch.need(tokens).canvas) if request.compared else need

    def _refuse(self, request: Request, need: Need, passing: int = 0) -> None:
        """Refuse a request that needs more memory than the device has to spare, if that is known.

        ``passing`` is what it will have besides when the request's turn comes. What is kept of canvases that are gone
        is given up first.
        """
        room = memory.available(self._decoder.device)
        if room is not None and need.total > room + passing:
            KEPT.release()
            room = memory.available(self._decoder.device)
        if room is not None and need.total > room + passing:
            raise ResourceExhausted(
                f"prefilling {len(request.prompt)} tokens takes up to {_mebibytes(need.total)} of memory, and "
                f"{self._decoder.device} has {_mebibytes(room + passing)} to spare"
            )

    def scratch(self) -> ScratchStats:
        """Return what prefills take of the device's memory, and what it has."""
        planned = self._scratch.need(self._decoder.max_positions)
        with self._lock:
            largest = self._largest
        room = memory.available(self._decoder.device)
        if room is not None and self._decoder.device.type == "cpu":
            room += KEPT.nbytes
        return ScratchStats(planned.total, planned.parts(), largest, room)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"

"""What is refused before anything runs: prompts, plans and token ids that the model cannot take, or memory cannot."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter

from blend import memory
from blend.chunks import ChunkCache
from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong, ResourceExhausted
from blend.model.decoder import Decoder
from blend.pipeline import Request
from blend.recompute import planner
from blend.recompute.calibration import Calibration
from blend.recompute.scratch import Scratch
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
        self._largest = 0

    def admit(self, prompt: Prompt, plan: Plan | None, namespace: str, reserve: int, arrived: float | None) -> Request:
        """Return the request for a prompt.

        Args:
            plan: ``None`` is ``Plan()``.
            reserve: tokens that the canvas is to have room for beyond the prompt.
            arrived: reading of :func:`time.perf_counter` that TTFT counts from; ``None`` is now.

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
        self._check_memory(len(prompt), capacity)
        return Request(prompt, plan, namespace, capacity, arrived)

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

    def _check_memory(self, tokens: int, capacity: int) -> None:
        """Refuse what does not fit in the memory that the device has to spare, if that is known."""
        need = self._scratch.need(capacity, tokens).total
        room = memory.available(self._decoder.device)
        if room is not None and need > room:
            raise ResourceExhausted(
                f"prefilling {tokens} tokens takes up to {_mebibytes(need)} of memory, and {self._decoder.device} has "
                f"{_mebibytes(room)} to spare"
            )
        with self._lock:
            self._largest = max(self._largest, need)

    def scratch(self) -> ScratchStats:
        """Return what prefills take of the device's memory, and what it has."""
        planned = self._scratch.need(self._decoder.max_positions)
        with self._lock:
            largest = self._largest
        return ScratchStats(planned.total, planned.parts(), largest, memory.available(self._decoder.device))


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"

"""What is refused before anything runs: prompts, plans and token ids that the model cannot take."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from blend.chunks import ChunkCache
from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong
from blend.model.decoder import Decoder
from blend.pipeline import Request
from blend.recompute import planner
from blend.recompute.calibration import Calibration
from blend.types import Plan, Prompt


class Admission:
    """Makes requests of what callers give, or says what is wrong with it.

    Args:
        decoder: the model that requests are for.
        chunks: its chunks in the store.
        calibration: what ``auto`` goes by, or ``None``.
    """

    def __init__(self, decoder: Decoder, chunks: ChunkCache, calibration: Calibration | None) -> None:
        self._decoder = decoder
        self._chunks = chunks
        self._calibration = calibration

    def admit(self, prompt: Prompt, plan: Plan | None, namespace: str, reserve: int, arrived: float | None) -> Request:
        """Return the request for a prompt.

        Args:
            plan: ``None`` is ``Plan()``.
            reserve: tokens that the canvas is to have room for beyond the prompt.
            arrived: reading of :func:`time.perf_counter` that TTFT counts from; ``None`` is now.

        Raises:
            InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong: it cannot run.
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

"""What is refused before anything runs, for the model or the memory cannot take it, and when there is memory for it."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
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

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


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
        self._rooms: set[Room] = set()

    def admit(
        self,
        prompt: Prompt,
        plan: Plan | None,
        namespace: str,
        reserve: int,
        arrived: float | None = None,
        compared: bool = False,
        positions: bool = False,
        request_id: str | None = None,
    ) -> tuple[Request, Room]:
        """Return the request for a prompt, and the memory that it has to take before it begins.

        Args:
            plan: ``None`` is ``Plan()``.
            reserve: tokens that the canvas is to have room for beyond the prompt.
            arrived: reading of :func:`time.perf_counter` that TTFT counts from; ``None`` is now.
            compared: whether the prompt is run at full prefill, too.
            positions: whether the report lists what was recomputed.
            request_id: what logs call it: 1 to 128 printable ASCII characters without spaces.

        Raises:
            InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong: it cannot run.
            ResourceExhausted: the device has not the memory for it, nor will it when all that runs has ended.
        """
        now = perf_counter()
        arrived = now if arrived is None else arrived
        if not isinstance(prompt, Prompt):
            raise InvalidPrompt("prompt", prompt, "a Prompt")
        self.check_ids("prompt", prompt.token_ids)
        plan = Plan() if plan is None else plan
        if not isinstance(plan, Plan):
            raise InvalidPlan("plan", plan, "a Plan")
        if not isinstance(reserve, int) or isinstance(reserve, bool) or reserve < 0:
            raise InvalidInput("reserve", reserve, "an integer of 0 or more")
        if request_id is not None and not (isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id)):
            raise InvalidInput("request_id", request_id, "1 to 128 printable ASCII characters without spaces")
        planner.decide(plan, self._calibration)
        self._chunks.namespace(namespace)
        capacity, most = len(prompt) + reserve, self._decoder.max_positions
        if capacity > most:
            raise PromptTooLong(capacity, most, "prompt with room for its answer")
        need = self._need(len(prompt), capacity, compared)
        room = Room(self, need, answer=need.canvas * reserve // capacity, tokens=len(prompt))
        request = Request(
            prompt, plan, namespace, capacity, arrived, now, compared=compared, positions=positions, filled=room.filled
        )
        if request_id is not None:
            request = replace(request, id=request_id)
        with self._lock:
            held = sum(other.need.total for other in self._rooms)
            self._refuse(room, self._available(need.total - held), held)
            self._largest = max(self._largest, need.total)
        return request, room

    def room(self, tokens: int) -> Room:
        """Return the memory that a full prefill of so many tokens has to take before it begins."""
        return Room(self, self._need(tokens, tokens, False), answer=0, tokens=tokens)

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

    def take(self, room: Room, last: bool) -> bool:
        """See :meth:`Room.take`."""
        with self._lock:
            promised = sum(other.promised for other in self._rooms)
            available = self._available(room.need.total + promised)
            if available is not None and room.need.total > available - promised:
                if last:
                    self._refuse(room, available, -promised)
                return False
            self._rooms.add(room)
            return True

    def give(self, room: Room) -> None:
        """See :meth:`Room.give`."""
        with self._lock:
            self._rooms.discard(room)

    def _available(self, wanted: int) -> int | None:
        """What the device has to spare. What is kept of canvases that are gone is given up first where that is less."""
        room = memory.available(self._decoder.device)
        if room is not None and room < wanted:
            KEPT.release()
            room = memory.available(self._decoder.device)
        return room

    def _need(self, tokens: int, capacity: int, compared: bool) -> Need:
        """What a request takes of the device's memory at most."""
        need = self._scratch.need(capacity, tokens)
        return replace(need, canvas=need.canvas + self._scratch.need(tokens).canvas) if compared else need

    def _refuse(self, room: Room, available: int | None, more: int) -> None:
        """Refuse a request that needs more memory than is available, ``more`` of it added, if that is known."""
        if available is not None and room.need.total > available + more:
            raise ResourceExhausted(
                f"prefilling {room.tokens} tokens takes up to {_mebibytes(room.need.total)} of memory, and "
                f"{self._decoder.device} has {_mebibytes(max(0, available + more))} to spare"
            )

    def scratch(self) -> ScratchStats:
        """Return what prefills take of the device's memory, and what it has."""
        planned = self._scratch.need(self._decoder.max_positions)
        with self._lock:
            largest = self._largest
            held = sum(other.need.total for other in self._rooms)
            promised = sum(other.promised for other in self._rooms)
        room = memory.available(self._decoder.device)
        if room is not None and self._decoder.device.type == "cpu":
            room += KEPT.nbytes
        return ScratchStats(planned.total, planned.parts(), largest, room, held, promised)


class Room:
    """The memory of one request, from its beginning to its end.

    A canvas takes its memory when it is written, so what requests will still write has to be kept for them.

    Args:
        admission: owns the memory.
        need: what it takes.
        answer: the canvas's bytes behind the prompt.
        tokens: of the prompt.

    Attributes:
        promised: bytes that it has not written yet.
    """

    def __init__(self, admission: Admission, need: Need, answer: int, tokens: int) -> None:
        self.need = need
        self.tokens = tokens
        self.promised = need.canvas
        self._answer = answer
        self._admission = admission

    def take(self, last: bool) -> bool:
        """Take it, if it is there; returns whether it was.

        Raises:
            ResourceExhausted: it is not, and with ``last`` nobody will give any back.
        """
        return self._admission.take(self, last)

    def filled(self) -> None:
        """Take note that the prompt's part of the canvas is written."""
        self.promised = self._answer

    def give(self) -> None:
        """Give it back, if it was taken."""
        self._admission.give(self)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"

"""The path of one request: plan → load → select → recompute → decode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from blend.chunks import ChunkCache, Which
from blend.errors import ResourceExhausted
from blend.filling import ChunkLost, Loaded, Lost
from blend.model.decoder import Decoder, Rows
from blend.recompute import passes, planner, prefill
from blend.recompute.calibration import Calibration
from blend.recompute.canvas import Canvas
from blend.recompute.prefill import Repair
from blend.recompute.select import Blend, selector
from blend.reporting import build_report
from blend.scheduler import Turns
from blend.store import ObjectKey
from blend.types import Comparison, Plan, Prompt, Report

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A validated request.

    ``capacity`` is the canvas's length, ``arrived`` the clock reading that TTFT counts from. ``repair`` is run in the
    place of the plan's method, over the chunks that the plan loads. ``compared`` tells whether the prompt is run at
    full prefill afterwards, on a canvas of its own.
    """

    prompt: Prompt
    plan: Plan
    namespace: str
    capacity: int
    arrived: float
    repair: Repair | None = None
    compared: bool = False


@dataclass(eq=False)
class State:
    """A prefilled request: the canvas, ``token_ids`` ``[N]``, ``logits`` ``[V]`` of the last one, the report so far."""

    request: Request
    canvas: Canvas
    token_ids: torch.Tensor
    logits: torch.Tensor
    report: Report


class Pipeline:
    """Runs requests step by step; each step takes a turn, so that several requests can be under way.

    Args:
        decoder, chunks: the model, and its chunks in the store.
        calibration: what ``auto`` goes by, or ``None``.
        speed: what is known of full prefill's speed.
        turns: who may use the model now.
        max_rows: most rows of one forward pass.
        running: what a request is prefilled within; it refuses one that the device has not the memory for.
    """

    def __init__(
        self,
        decoder: Decoder,
        chunks: ChunkCache,
        calibration: Calibration | None,
        speed: planner.PrefillSpeed,
        turns: Turns,
        max_rows: int,
        running: Callable[[Request], AbstractContextManager[object]],
    ) -> None:
        self.decoder = decoder
        self._chunks = chunks
        self._calibration = calibration
        self._speed = speed
        self._turns = turns
        self._max_rows = max_rows
        self._running = running

    def prefill(self, request: Request, positions: bool) -> State:
        """Plan, load, select, recompute: from the prompt to the logits of its last position.

        When a chunk is lost while the request is being computed from it, the request is planned again without that
        chunk; when another is, it runs at full prefill.

        Raises:
            ResourceExhausted: the device has not the memory for it, now that its turn has come.
        """
        lost: dict[ObjectKey, str] = {}
        decision = planner.decide(request.plan, self._calibration)
        if request.repair is not None:
            decision = replace(decision, method=request.repair.name, ratio=request.repair.ratio)
        while True:
            begin = perf_counter()
            try:
                return self._attempt(request, decision, positions, lost)
            except ChunkLost as error:
                _log.warning("planning again: %s", str(error))
                if lost:
                    decision = planner.give_up(decision, f"two chunks were lost while they were loaded: {error.reason}")
                lost[error.wanted] = f"{error.reason} ({(perf_counter() - begin) * 1e3:.0f} ms of work were lost)"
            except (torch.OutOfMemoryError, MemoryError) as error:
                refused = f"{self.decoder.device} has not the memory for {len(request.prompt)} tokens now: {error}"
                break
        # Not while that error is handled: it holds the frames, and these hold what memory there was.
        raise ResourceExhausted(refused)

    def _attempt(self, request: Request, decision: planner.Decision, positions: bool, lost: Lost) -> State:
        prompt, layers = request.prompt, self.decoder.layers
        which = _which(decision.method)
        repair = None if decision.method == "full" else request.repair
        with self._chunks.find(prompt, request.namespace, request.plan.variant, which, lost) as filling:
            filling.wait(whole=self._turns.waiting > 0)  # with others about, as little as may be is left to the turn
            with self._turns.turn() as queue_ms, self._running(request):
                canvas = self.decoder.new_canvas(request.capacity)
                token_ids = torch.tensor(prompt.token_ids, device=self.decoder.device)
                loaded = filling.settle()
                blend = describe(self.decoder, prompt, canvas, token_ids, loaded, self._max_rows)
                chooser = selector(decision.method) if repair is None else None
                probe = 0 if chooser is None else chooser.probe_cost(blend)
                mandatory = len(prompt) - blend.cached
                decision = planner.settle(
                    decision, cached=blend.cached, probe=probe, rows=mandatory, tokens=len(prompt), layers=layers
                )
                if decision.method == "full":
                    loaded, chooser = loaded.unused(), None
                    blend = describe(self.decoder, prompt, canvas, token_ids, loaded, self._max_rows)
                    filling.close()
                else:
                    filling.onto(canvas)
                budget = decision.budget(layers, blend.cached)
                if repair is None:
                    outcome = prefill.blended(blend, None if chooser is None else chooser.select, budget)
                else:
                    outcome = repair(blend, budget)
                self._speed.saw(self._speed.flops(outcome.rows.tolist()), outcome.recompute_ms)
        report = build_report(
            decision,
            loaded,
            blend,
            budget,
            outcome,
            queue_ms=queue_ms,
            full_estimate_ms=self._speed.full_ms(len(prompt)),
            calibrated=self._calibration is not None,
            positions=positions,
            lost=lost,
        )
        return State(request, canvas, token_ids, outcome.logits, report)

    def next(self, canvas: Canvas, token: int, position: int) -> int:
        """Return the greedy token after ``token``, which stands at ``position``. Only its id leaves the device."""
        row = Rows(canvas, torch.tensor([position]), torch.tensor([token]))
        with self._turns.turn():
            return int(passes.unstopped(self.decoder.forward([row]))[0].argmax())

    def extend(self, canvas: Canvas, start: int, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute given tokens from position ``start`` on; returns the logits ``[T, V]`` after each of the T tokens."""
        found = []
        for part in torch.tensor(token_ids).split(self._max_rows):
            rows = Rows(canvas, torch.arange(start, start + len(part)), part)
            with self._turns.turn():
                found.append(passes.unstopped(self.decoder.forward([rows], keep="all")))
            start += len(part)
        return torch.cat(found)

    def compare(self, state: State) -> Comparison:
        """Run the same prompt at full prefill and return how far the request was from it."""
        with self._turns.turn():
            canvas = self.decoder.new_canvas(len(state.token_ids))
            start = perf_counter()
            full = passes.everything(self.decoder, canvas, state.token_ids, self._max_rows)
            passes.synchronize(self.decoder.device)
            elapsed = (perf_counter() - start) * 1e3
            self._speed.saw(self._speed.flops(range(len(state.token_ids))), elapsed)
        kl = torch.nn.functional.kl_div(
            state.logits.log_softmax(-1), full.log_softmax(-1), reduction="sum", log_target=True
        )
        return Comparison(elapsed, max(0.0, float(kl)), bool(full.argmax() == state.logits.argmax()))


def describe(
    decoder: Decoder, prompt: Prompt, canvas: Canvas, token_ids: torch.Tensor, loaded: Loaded, max_rows: int
) -> Blend:
    """Describe a canvas to the selectors: what is loaded, what is missing, and where the question is.

    Args:
        token_ids: ``[N]`` int64, the prompt's.
        max_rows: most rows of one forward pass.
    """
    length = len(token_ids)
    missing, held, exact = (torch.zeros(length, dtype=torch.bool, device=token_ids.device) for _ in range(3))
    for mask, spans in ((missing, loaded.missing), (held, loaded.chunks), (exact, loaded.exact)):
        for start, end in spans:
            mask[start:end] = True
    last_chunk = max((start + len(part) for start, part in prompt.parts()), default=0)
    question = (min(last_chunk, length - 1), length)
    text = ~(missing | held)
    text[question[0] :] = True
    return Blend(
        decoder=decoder,
        canvas=canvas,
        token_ids=token_ids,
        chunks=tuple(loaded.chunks),
        candidates=held & ~exact,
        missing=missing,
        text=text,
        question=question,
        max_rows=max_rows,
    )


def _which(method: str) -> Which:
    return {"full": "none", "prefix": "exact"}.get(method, "all")  # type: ignore[return-value]


def at_first_token(report: Report, request: Request) -> Report:
    """Stop the TTFT clock: it runs from the request's arrival, queue and fetch included."""
    return replace(report, timings=replace(report.timings, first_token=(perf_counter() - request.arrived) * 1e3))

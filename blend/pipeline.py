"""The path of one request: plan → load → select → recompute → decode, each a step that the engine carries out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch

from blend.chunks import ChunkCache, Which
from blend.errors import Cancelled, DeadlineExceeded, ResourceExhausted
from blend.filling import ChunkLost, Filling, Loaded, Lost
from blend.finding import found_of, nbytes_of
from blend.model.decoder import Decoder, Rows
from blend.model.tokenizer import Tokenizer
from blend.recompute import passes, planner, prefill
from blend.recompute.budget import Budget
from blend.recompute.calibration import Calibration
from blend.recompute.canvas import Canvas
from blend.recompute.correct import PassRepeated
from blend.recompute.prefill import Outcome, Repair
from blend.recompute.select import Blend, Selector, selector
from blend.reporting import build_report
from blend.serving.draft import Draft
from blend.serving.sampling import Sampler
from blend.serving.steps import Alone, Aside, Decode, Prefill, Step, Steps, do
from blend.store import ObjectKey
from blend.types import Answer, Comparison, Finish, Phase, Plan, Prompt, Report, Sampling, Token

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A validated request.

    ``capacity`` is the canvas's length, ``arrived`` the reading of :func:`time.perf_counter` that TTFT counts from, and
    ``admitted`` the one that its wait for the engine does. ``repair`` is run in the place of the plan's method, over
    the chunks that the plan loads. ``compared`` tells whether the prompt is run at full prefill afterwards, on a canvas
    of its own; ``positions`` whether the report lists what was recomputed. ``filled`` is called once the canvas is.
    ``id`` is what logs call it.
    """

    prompt: Prompt
    plan: Plan
    namespace: str
    capacity: int
    arrived: float
    admitted: float = 0.0
    repair: Repair | None = None
    compared: bool = False
    positions: bool = False
    filled: Callable[[], None] | None = None
    id: str = "-"


@dataclass(eq=False)
class State:
    """A prefilled request: the canvas, ``token_ids`` ``[N]``, ``logits`` ``[V]`` of the last one, the report so far."""

    request: Request
    canvas: Canvas
    token_ids: torch.Tensor
    logits: torch.Tensor
    report: Report


class Pipeline:
    """What requests are made of. Each method returns the steps of one thing; the scheduler carries them out.

    Args:
        decoder, tokenizer, chunks: the model, its text, and its chunks in the store.
        calibration: what ``auto`` goes by, or ``None``.
        speed: predicts what work takes, and learns from it.
        max_rows: most rows of one forward pass.
        crowded: whether others wait for the engine, and as little as may be is left to its thread.
        stopped: says why ``auto`` may not blend now; nothing where it may.
        finished: told of a request that has its first token.
        answered: told of a request whose answer is over, with its report.
        replanned: told of a request that is planned again, for a chunk was lost or a shared pass failed.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        chunks: ChunkCache,
        calibration: Calibration | None,
        speed: planner.PrefillSpeed,
        max_rows: int,
        crowded: Callable[[], bool],
        stopped: Callable[[], str],
        finished: Callable[[Request, Report], None],
        answered: Callable[[State, Report], None],
        replanned: Callable[[], None] = lambda: None,
    ) -> None:
        self.decoder = decoder
        self._tokenizer = tokenizer
        self._chunks = chunks
        self._calibration = calibration
        self._speed = speed
        self._max_rows = max_rows
        self._crowded = crowded
        self._stopped = stopped
        self._finished = finished
        self._answered = answered
        self._replanned = replanned

    def answer(self, request: Request, sampling: Sampling, emit: Callable[[Token], None]) -> Steps[Answer]:
        """Prefill, then decode token by token; ``emit`` gets each of them."""
        draft = Draft(self._tokenizer, sampling.stop)
        state = yield from self.prefill(request)
        finish = yield from self._decode(state, sampling, draft, emit)
        report = state.report
        if request.compared and finish in ("stop", "length"):
            try:
                report = replace(report, comparison=(yield from self.compare(state.token_ids, state.logits)))
            except (Cancelled, DeadlineExceeded) as error:
                report = replace(report, warnings=(*report.warnings, f"not compared with full prefill: {error}"))
        self._answered(state, report)
        return Answer(draft.text(), tuple(draft.token_ids), finish, report)

    def _decode(self, state: State, sampling: Sampling, draft: Draft, emit: Callable[[Token], None]) -> Steps[Finish]:
        """Generate the answer; returns how it ended. The state has its report as of the first token then."""
        sampler = Sampler(sampling)
        token = sampler.choose(state.logits)
        state.report = self._at_first_token(state)
        try:
            while token not in self._tokenizer.eos_ids:
                emit(draft.push(token))
                if draft.stopped or len(draft) == sampling.max_new_tokens:
                    break
                position = len(state.token_ids) + len(draft) - 1
                token = yield from do(Decode(state.canvas, token, position, sampler))
        except (Cancelled, DeadlineExceeded) as error:
            return "cancelled" if isinstance(error, Cancelled) else "deadline"
        return "stop" if draft.stopped or token in self._tokenizer.eos_ids else "length"

    def prefilled(self, request: Request) -> Steps[State]:
        """Prefill, and the comparison where one is asked for."""
        state = yield from self.prefill(request)
        state.report = self._at_first_token(state)
        if request.compared:
            comparison = yield from self.compare(state.token_ids, state.logits)
            state.report = replace(state.report, comparison=comparison)
        return state

    def _at_first_token(self, state: State) -> Report:
        """Stop the TTFT clock: it runs from the request's arrival, queue and fetch included."""
        elapsed = (perf_counter() - state.request.arrived) * 1e3
        report = replace(state.report, timings=replace(state.report.timings, first_token=elapsed))
        self._finished(state.request, report)
        return report

    def prefill(self, request: Request) -> Steps[State]:
        """Plan, load, select, recompute: from the prompt to the logits of its last position.

        When a chunk is lost while the request is being computed from it, the request is planned again without that
        chunk; when another is, it runs at full prefill. It is also planned again where a pass that it shared failed for
        another request, and left its canvas half computed.

        Raises:
            ResourceExhausted: the device ran out of memory.
        """
        lost: dict[ObjectKey, str] = {}
        decision = planner.decide(request.plan, self._calibration, self._stopped())
        if request.repair is not None:
            decision = replace(decision, method=request.repair.name, ratio=request.repair.ratio)
        while True:
            begin = perf_counter()
            try:
                return (yield from self._attempt(request, decision, lost))
            except ChunkLost as error:
                _log.warning("planning again: %s", str(error))
                self._replanned()
                if lost:
                    decision = planner.give_up(decision, f"two chunks were lost while they were loaded: {error.reason}")
                lost[error.wanted] = f"{error.reason} ({(perf_counter() - begin) * 1e3:.0f} ms of work were lost)"
            except PassRepeated as error:
                _log.warning("planning again: %s", str(error))
                self._replanned()
            except (torch.OutOfMemoryError, MemoryError) as error:
                refused = f"{self.decoder.device} has not the memory for {len(request.prompt)} tokens now: {error}"
                break
        # Not while that error is handled: it holds the frames, and these hold what memory there was.
        raise ResourceExhausted(refused)

    def _attempt(self, request: Request, decision: planner.Decision, lost: Lost) -> Steps[State]:
        prompt, layers = request.prompt, self.decoder.layers
        times = _Times(request.admitted)
        repair = None if decision.method == "full" else request.repair
        crowded = self._crowded()
        with ExitStack() as held:
            filling = yield from do(Aside(lambda: self._load(request, decision, lost, held, whole=crowded)))
            canvas = self.decoder.new_canvas(request.capacity)
            token_ids = torch.tensor(prompt.token_ids, device=self.decoder.device)
            laid_out = partial(describe, self.decoder, prompt, canvas, token_ids, max_rows=self._max_rows)
            loaded = filling.settle()
            blend = laid_out(loaded)
            found = found_of(blend, loaded)
            if repair is None:
                known = _which(decision.method)
                decision = planner.settle(decision, request.plan, self._calibration, found, self._speed)
                if decision.method == "prefix" and known != "exact":  # what is not exact is to be let go of
                    filling.close()
                    filling = yield from do(Aside(lambda: self._load(request, decision, lost, held, whole=crowded)))
                    loaded = filling.settle()
                    blend = laid_out(loaded)
            if decision.method == "full":
                loaded = loaded.unused()
                blend = laid_out(loaded)
                filling.close()
            else:
                filling.onto(canvas)
                if crowded:  # nobody else is to wait in a pass for a chunk of this one
                    yield from times.of(None, Alone(lambda: canvas.need(layers - 1)), canvas)
            budget = decision.budget(layers, blend.cached)
            if repair is None:
                chooser = selector(decision.method)
                outcome = yield from self._blended(blend, chooser, budget, times)
                self._speed.chose(decision.method, found.probing(decision), outcome.select_ms)
            else:
                outcome = yield from do(Alone(lambda: repair(blend, budget), rows=len(prompt)))
        if request.filled is not None:
            request.filled()
        self._speed.loaded(nbytes_of(loaded), loaded.lookup_ms + loaded.fetch_ms + loaded.rotate_ms)
        report = build_report(
            decision,
            loaded,
            blend,
            budget,
            outcome,
            queue_ms=times.waited_ms,
            full_estimate_ms=self._speed.full_ms(len(prompt)),
            calibrated=self._calibration is not None,
            stopped=self._stopped(),
            positions=request.positions,
            lost=lost,
            phases=times.phases,
        )
        return State(request, canvas, token_ids, outcome.logits, report)

    def _load(self, request: Request, decision: planner.Decision, lost: Lost, held: ExitStack, whole: bool) -> Filling:
        """Look up a request's chunks and wait for them; ``held`` lets go of them."""
        which = _which(decision.method)
        filling = self._chunks.find(request.prompt, request.namespace, request.plan.variant, which, lost)
        held.enter_context(filling).wait(whole)
        return filling

    def _blended(self, blend: Blend, chooser: Selector | None, budget: Budget, times: _Times) -> Steps[Outcome]:
        """Select, then compute misses, plain text and the selected tokens."""
        selection, select_ms = prefill.nothing(blend), 0.0
        if chooser is not None:
            probe = chooser.probe_cost(blend) / self.decoder.layers
            choosing = Alone(lambda: chooser.select(blend, budget), rows=probe)
            selection, select_ms = yield from times.of("select", choosing, blend.canvas)
        rows = prefill.rows_of(blend, selection)
        computing = Prefill(blend.canvas, blend.token_ids, rows, observer=prefill.observer_of(selection))
        logits, recompute_ms = yield from times.of("recompute", computing, blend.canvas)
        return Outcome(logits, selection, rows, select_ms, recompute_ms)

    def extend(self, canvas: Canvas, start: int, token_ids: Sequence[int]) -> Steps[torch.Tensor]:
        """Compute given tokens from position ``start`` on; returns the logits ``[T, V]`` after each of the T tokens."""
        found = []
        for part in torch.tensor(token_ids).split(self._max_rows):
            rows = Rows(canvas, torch.arange(start, start + len(part)), part)
            all_ = Alone(lambda rows=rows: passes.unstopped(self.decoder.forward([rows], keep="all")), rows=len(part))  # type: ignore[misc]
            found.append((yield from do(all_)))
            start += len(part)
        return torch.cat(found)

    def greedy(self, canvas: Canvas, logits: torch.Tensor, tokens: int, max_new_tokens: int) -> Steps[tuple[int, ...]]:
        """Decode greedily from the ``logits`` ``[V]`` after so many tokens."""
        sampler, produced = Sampler(Sampling()), list[int]()
        token = sampler.choose(logits)
        while token not in self._tokenizer.eos_ids and len(produced) < max_new_tokens:
            produced.append(token)
            if len(produced) < max_new_tokens:
                token = yield from do(Decode(canvas, token, tokens + len(produced) - 1, sampler))
        return tuple(produced)

    def compare(self, token_ids: torch.Tensor, logits: torch.Tensor) -> Steps[Comparison]:
        """Run a prompt ``[N]`` at full prefill, in passes of its own; returns how far ``logits`` ``[V]`` are from it.

        The KL of logits that are not finite is NaN.
        """
        canvas = self.decoder.new_canvas(len(token_ids))
        computing = Prefill(canvas, token_ids, torch.arange(len(token_ids), device=token_ids.device), shared=False)
        full = yield from do(computing)
        kl = float(
            torch.nn.functional.kl_div(logits.log_softmax(-1), full.log_softmax(-1), reduction="sum", log_target=True)
        )
        # Rounding may take it below 0; NaN is to stay NaN, which max() would not have it.
        return Comparison(computing.took_ms, 0.0 if kl < 0 else kl, bool(full.argmax() == logits.argmax()))


class _Times:
    """Adds up what the steps of a request waited for the engine's thread, ``waited_ms`` so far, and when they ran.

    Args:
        admitted: reading of :func:`time.perf_counter` that the wait for the engine began at.
    """

    def __init__(self, admitted: float) -> None:
        now = perf_counter()
        self.waited_ms = (now - admitted) * 1e3
        self.phases = [Phase("queue", admitted, now)]

    def of(self, name: str | None, step: Step[T], canvas: Canvas) -> Steps[tuple[T, float]]:
        """Take a step; returns its result and its milliseconds, without what filling the canvas took meanwhile.

        ``name`` is its phase's; one that does nothing but fill the canvas has none beside those of that.
        """
        filled, begin = canvas.fill_ms, perf_counter()
        yield step
        if name is not None:
            self.phases.append(Phase(name, begin + step.waited_ms / 1e3, perf_counter()))
        self.waited_ms += step.waited_ms
        return step.result, step.took_ms - (canvas.fill_ms - filled)


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
        sensitivity=_sensitivity(loaded, length, token_ids.device),
    )


def _sensitivity(loaded: Loaded, length: int, device: torch.device) -> torch.Tensor | None:
    """Return ``[L, N]`` float32 over a prompt of ``length`` tokens; ``None`` where no loaded chunk has any."""
    known = [own for own in loaded.sensitivities if own is not None]
    if not known:
        return None
    total = torch.stack([own.sum(dim=1, dtype=torch.float32) for own in known]).sum(dim=0)
    mean = total / sum(own.shape[1] for own in known)
    whole = torch.zeros(len(mean), length)
    for (start, end), own in zip(loaded.chunks, loaded.sensitivities, strict=True):
        whole[:, start:end] = mean[:, None] if own is None else own
    return whole.to(device)


def _which(method: str) -> Which:
    return {"full": "none", "prefix": "exact"}.get(method, "all")  # type: ignore[return-value]

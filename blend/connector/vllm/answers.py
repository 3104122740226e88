"""What vLLM says of a request, as blend's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blend.recompute.planner import Decision
from blend.types import EXACT_METHODS, Chunk, ChunkReport, Prompt, Report, Timings


@dataclass(frozen=True)
class Asked:
    """A request to vLLM.

    Args:
        prompt: its prompt.
        keys: the content keys of the prompt's chunks, in order.
        decision: what its plan comes to before anything is looked up.
        positions: whether the report is to list positions.
        calibrated: whether the model has a calibration.
        arrived: reading of :func:`time.perf_counter` that its first token's time counts from.
    """

    prompt: Prompt
    keys: tuple[str, ...]
    decision: Decision
    positions: bool
    calibrated: bool
    arrived: float


def report_of(asked: Asked, told: Mapping[str, Any] | None, found: int, queue_ms: float, ttft_ms: float) -> Report:
    """Return the report of a request.

    What vLLM does not tell stays 0: no time is predicted, no full prefill's estimated, and ``Timings.fetch`` is all of
    looking up, loading and placing.

    Args:
        asked: the request.
        told: what the connector says of it (:class:`blend.connector.vllm.jobs.Report`), or ``None`` where it had
            nothing to do: an exact method, a request that it could not blend, or one whose blocks are those of an
            identical one before.
        found: tokens that vLLM did not compute for this request; where the connector had nothing to do, those that
            were in vLLM's prefix cache.
        queue_ms: how long it waited in vLLM's queue.
        ttft_ms: time to its first token.
    """
    if told is not None:
        return _blended(asked, told, queue_ms, ttft_ms)
    decision, tokens = asked.decision, len(asked.prompt)
    timings = Timings(queue=queue_ms, first_token=ttft_ms)
    positions = tuple(range(found, tokens)) if asked.positions else None
    if decision.method not in EXACT_METHODS and found >= _end(asked.prompt):
        return Report(
            mode=decision.method,
            reason="the blocks of an identical request were in vLLM's prefix cache",
            tokens=tokens,
            cached=0,
            mandatory=tokens - found,
            selected=0,
            requested_ratio=decision.ratio,
            selected_ratio=0.0,
            charged_ratio=0.0,
            chunks=(),
            timings=timings,
            full_estimate_ms=0.0,
            predicted_kl=decision.predicted_kl,
            warnings=_warnings(asked, decision.method, found),
            recomputed_positions=positions,
        )
    exact = decision.method in EXACT_METHODS
    return Report(
        mode=decision.method if exact else "full",
        reason=decision.reason if exact else "vLLM did not blend it; its log says why",
        tokens=tokens,
        cached=0,
        mandatory=tokens,
        selected=0,
        requested_ratio=decision.ratio if exact else 1.0,
        selected_ratio=1.0,
        charged_ratio=1.0,
        chunks=_unused(asked) if exact else (),
        timings=timings,
        full_estimate_ms=0.0,
        predicted_kl=0.0,
        warnings=_warnings(asked, "full", found),
        recomputed_positions=positions,
    )


def _blended(asked: Asked, told: Mapping[str, Any], queue_ms: float, ttft_ms: float) -> Report:
    method, cached, selected = told["method"], told["cached"], told["selected"]
    computed, tokens = told["computed"], len(asked.prompt)
    full = method == "full"
    positions = None
    if asked.positions:
        # vLLM itself computes what follows the last chunk.
        positions = (*told["recomputed_positions"], *range(computed + told["filled"], tokens))
    return Report(
        mode=method,
        reason=told["reason"],
        tokens=tokens,
        cached=cached,
        mandatory=tokens - cached,
        selected=selected,
        requested_ratio=told["ratio"],
        selected_ratio=1.0 if full else selected / cached if cached else 0.0,
        charged_ratio=told["charged_ratio"],
        chunks=tuple(ChunkReport(**chunk) for chunk in told["chunks"]),
        timings=Timings(
            queue=queue_ms + told["waited_ms"],
            fetch=told["load_ms"],
            select=told["select_ms"],
            recompute=told["recompute_ms"],
            first_token=ttft_ms,
        ),
        full_estimate_ms=0.0,
        predicted_kl=told.get("predicted_kl"),
        warnings=_warnings(asked, method, computed),
        recomputed_positions=positions,
    )


def _warnings(asked: Asked, method: str, found: int) -> tuple[str, ...]:
    said = [f"{found} of the prompt's tokens were in vLLM's own prefix cache"] if found else []
    if method not in EXACT_METHODS and not asked.calibrated:
        said.append("this model has no calibration: its loss against full prefill is unknown")
    return tuple(said)


def _unused(asked: Asked) -> tuple[ChunkReport, ...]:
    spans = _chunk_spans(asked.prompt)
    return tuple(
        ChunkReport(key, start, end - start, "unused") for key, (start, end) in zip(asked.keys, spans, strict=True)
    )


def _end(prompt: Prompt) -> int:
    """The position that vLLM finds a blended request's blocks up to, where it finds all of them: at most the last."""
    return min(max((end for _, end in _chunk_spans(prompt)), default=0), len(prompt) - 1)


def _chunk_spans(prompt: Prompt) -> Sequence[tuple[int, int]]:
    return [(start, end) for start, end, segment in prompt.spans() if isinstance(segment, Chunk)]

"""Turns what a prefill did into its report."""

from __future__ import annotations

from collections.abc import Sequence

from blend.filling import Loaded, Lost
from blend.recompute.budget import Budget
from blend.recompute.planner import Decision
from blend.recompute.prefill import Outcome
from blend.recompute.select import Blend
from blend.types import EXACT_METHODS, PLAIN_METHODS, Phase, Report, Timings


def build_report(
    decision: Decision,
    loaded: Loaded,
    blend: Blend,
    budget: Budget,
    outcome: Outcome,
    *,
    queue_ms: float,
    full_estimate_ms: float,
    calibrated: bool,
    stopped: str,
    positions: bool,
    lost: Lost,
    phases: Sequence[Phase],
) -> Report:
    """Return the report of a prefill, its TTFT still to be set.

    At full prefill nothing counts as cached, and all three ratios are 1.
    """
    tokens, cached = len(blend.token_ids), blend.cached
    full = decision.method == "full"
    selected = len(outcome.selection.positions)
    return Report(
        mode=decision.method,
        reason=decision.reason,
        tokens=tokens,
        cached=cached,
        mandatory=tokens - cached,
        selected=selected,
        requested_ratio=decision.ratio,
        selected_ratio=1.0 if full else selected / cached if cached else 0.0,
        charged_ratio=1.0 if full else budget.charged(outcome.selection.probe, selected),
        chunks=tuple(loaded.reports),
        timings=Timings(
            queue=queue_ms,
            lookup=loaded.lookup_ms,
            fetch=loaded.fetch_ms,
            rotate=loaded.rotate_ms,
            select=outcome.select_ms,
            recompute=outcome.recompute_ms,
        ),
        full_estimate_ms=full_estimate_ms,
        predicted_ms=decision.predicted_ms,
        predicted_kl=decision.predicted_kl,
        warnings=_warnings(decision, blend, budget, outcome, calibrated, stopped, lost),
        recomputed_positions=tuple(outcome.rows.tolist()) if positions else None,
        phases=(*phases, *loaded.phases),
    )


def _warnings(
    decision: Decision, blend: Blend, budget: Budget, outcome: Outcome, calibrated: bool, stopped: str, lost: Lost
) -> tuple[str, ...]:
    found = [f"planned again: {wanted} was lost while it was loaded: {why}" for wanted, why in lost.items()]
    if decision.method not in EXACT_METHODS and not calibrated:
        found.append("this model has no calibration: its loss against full prefill is unknown")
    if decision.method not in EXACT_METHODS and stopped:
        found.append(stopped)
    if decision.method not in PLAIN_METHODS:
        wanted = Budget(budget.layers, budget.cached, budget.ratio).rows(probe=0)
        none = wanted and len(outcome.selection.positions) == 0 and bool(blend.candidates.any())
        if none and decision.max_charged is not None:
            found.append(
                f"max_charged={decision.max_charged:g} leaves nothing to select: chunks were reused as they are"
            )
    return tuple(found)

"""Which method a request runs, and when full prefill is cheaper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from blend.errors import InvalidPlan
from blend.model.decoder import Decoder
from blend.recompute.budget import Budget
from blend.recompute.calibration import Calibration, Curve
from blend.recompute.select import methods
from blend.types import PLAIN_METHODS, Plan

DEFAULT_RATIO = 0.15
"""Share of cached tokens that a named method selects, and the cap of ``auto``, unless the plan says otherwise."""

_WORTH_IT = 0.9
"""``auto`` blends only where the estimated work is below this share of full prefill's."""


@dataclass(frozen=True)
class Decision:
    """The method to run (never ``auto``), its ratio and cap, whether ``auto`` chose it, and why."""

    method: str
    ratio: float
    max_charged: float | None
    automatic: bool
    reason: str

    def budget(self, layers: int, cached: int) -> Budget:
        """Return the budget for ``cached`` reusable tokens."""
        return Budget(layers, cached, self.ratio, self.max_charged)


def decide(plan: Plan, calibration: Calibration | None, stopped: str = "") -> Decision:
    """Turn a plan into a decision, before anything is looked up.

    Args:
        stopped: why ``auto`` may not blend now, if so.

    Raises:
        InvalidPlan: the plan names an unknown method.
    """
    if plan.method not in methods():
        raise InvalidPlan("method", plan.method, ", ".join(methods()))
    if plan.method != "auto":
        fixed = {"full": 1.0, "prefix": 0.0, "reuse": 0.0}
        ratio = DEFAULT_RATIO if plan.ratio is None else plan.ratio
        return Decision(plan.method, fixed.get(plan.method, ratio), plan.max_charged, False, "as asked")
    if stopped:
        return Decision("full", 1.0, None, True, stopped)
    if calibration is None:
        return Decision("full", 1.0, None, True, "this model has no calibration")
    cap = DEFAULT_RATIO if plan.max_charged is None else plan.max_charged
    point = calibration.choose(cap, plan.max_kl)
    if point is None:
        target = "" if plan.max_kl is None else f" keeps the mean KL under {plan.max_kl:g} and"
        return Decision("full", 1.0, None, True, f"no calibrated setting{target} is charged at most {cap:g}")
    return Decision(point.method, point.ratio, cap, True, f"calibrated mean KL {point.kl:.3f} at ratio {point.ratio:g}")


def settle(decision: Decision, *, cached: int, probe: int, rows: int, tokens: int, layers: int) -> Decision:
    """Revise an automatic decision once it is known what was loaded.

    Args:
        cached: reusable tokens that were loaded. probe: token-layers of the selector's probe.
        rows: mandatory rows. tokens: prompt length. layers: layers of the model.
    """
    if not decision.automatic or decision.method in PLAIN_METHODS:
        return decision
    if cached == 0:
        return give_up(decision, "no chunk was in the store")
    budget = decision.budget(layers, cached)
    if budget.rows(probe) == 0:
        return give_up(decision, f"choosing alone would use up the cap of {decision.max_charged:g}")
    if rows + budget.rows(probe) + probe / layers >= _WORTH_IT * tokens:
        return give_up(decision, "blending would save less than a tenth of the work")
    return decision


def give_up(decision: Decision, reason: str) -> Decision:
    """Return the decision to run full prefill after all."""
    return replace(decision, method="full", ratio=1.0, max_charged=None, reason=reason)


class PrefillSpeed:
    """Estimates full-prefill time from the passes seen so far, chunks being encoded among them.

    It keeps the best rate, so that a slow moment does not make full prefill look slower than it is.

    Args:
        decoder: the model.
        start: what a calibration measured on this machine, which holds until passes were faster.
    """

    def __init__(self, decoder: Decoder, start: Curve | None = None) -> None:
        self._start = start
        self._linear = decoder.linear_flops_per_row
        self._attention = 4.0 * decoder.layers * decoder.heads * decoder.head_dim
        self._best = 0.0

    def flops(self, positions: Iterable[int]) -> float:
        """Return the FLOPs of rows at ``positions``: linear layers, and attention over the keys to their left."""
        rows = list(positions)
        return len(rows) * self._linear + self._attention * (sum(rows) + len(rows))

    def saw(self, flops: float, milliseconds: float) -> None:
        """Record a pass."""
        if milliseconds > 0:
            self._best = max(self._best, flops / milliseconds)

    def full_ms(self, tokens: int) -> float:
        """Return the estimated full-prefill time of ``tokens`` in milliseconds; 0 while nothing is known."""
        known = [] if self._start is None else [self._start.ms(tokens)]
        if self._best > 0:
            known.append(self.flops(range(tokens)) / self._best)
        return min(known, default=0.0)

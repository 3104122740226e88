"""Which method a request runs: by its calibrated loss and predicted time, and full prefill where that is cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from blend.errors import InvalidPlan
from blend.model.decoder import Decoder
from blend.recompute.budget import Budget
from blend.recompute.calibration import Calibration, Curve, Point, StoredVariant
from blend.recompute.cost import PassCost, Running, Work
from blend.recompute.found import Found
from blend.recompute.select import methods
from blend.types import EXACT_METHODS, Plan

DEFAULT_RATIO = 0.15
"""Share of cached tokens that a named method selects, and the cap of ``auto``, unless the plan says otherwise."""

_WORTH_IT = 1.05 / 1.2
"""``auto`` blends only where that is predicted to take less than this share of full prefill's time. Predictions are
good to a fifth: what takes a fifth longer than predicted is then still no more than 5% slower than full prefill."""

_LEAST_ROWS = 16
"""Passes of fewer rows, as decoding has them, say little of how fast a prompt's rows are."""

_TRUSTED = 2
"""As many measurements have to agree before they outweigh a calibration: one alone may be odd."""


@dataclass(frozen=True)
class Decision:
    """What runs, and why.

    Args:
        method: to run, never ``auto``.
        ratio, max_charged: its ratio and its cap.
        automatic: whether ``auto`` chose it.
        reason: why.
        predicted_ms: what it is predicted to take, from the look-up to the first token; 0 while nothing is known.
        predicted_kl: the mean first-token KL to expect, in nats; ``None`` where nothing is known.
    """

    method: str
    ratio: float
    max_charged: float | None
    automatic: bool
    reason: str
    predicted_ms: float = 0.0
    predicted_kl: float | None = None

    def budget(self, layers: int, cached: int) -> Budget:
        """Return the budget for ``cached`` reusable tokens."""
        return Budget(layers, cached, self.ratio, self.max_charged)


def decide(plan: Plan, calibration: Calibration | None, stopped: str = "") -> Decision:
    """Turn a plan into a decision, before anything is looked up.

    ``auto`` decides for the best that may be found, which is chunks that were all stored conditioned;
    :func:`settle` holds that against what was.

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
        exact = 0.0 if plan.method in EXACT_METHODS else None
        ratio = fixed.get(plan.method, ratio)
        return Decision(plan.method, ratio, plan.max_charged, False, "as asked", predicted_kl=exact)
    if stopped or calibration is None:
        return Decision("full", 1.0, None, True, stopped or "this model has no calibration", predicted_kl=0.0)
    cap = DEFAULT_RATIO if plan.max_charged is None else plan.max_charged
    variants: tuple[StoredVariant, ...] = ("plain",) if plan.variant == "plain" else ("conditioned", "plain")
    for variant in variants:
        if point := calibration.choose(cap, plan.max_kl, variant):
            return _at(point, cap)
    return Decision("full", 1.0, None, True, _none_fits(plan, cap), predicted_kl=0.0)


def _at(point: Point, cap: float) -> Decision:
    reason = f"calibrated mean KL {point.kl:.3f} (at most {point.kl_high:.3f}) at ratio {point.ratio:g}"
    return Decision(point.method, point.ratio, cap, True, reason, predicted_kl=point.kl)


def _none_fits(plan: Plan, cap: float, variant: str = "") -> str:
    target = "" if plan.max_kl is None else f" keeps the mean KL{variant} under {plan.max_kl:g} and"
    return f"no calibrated setting{target} is charged at most {cap:g}"


def give_up(decision: Decision, reason: str) -> Decision:
    """Return the decision to run full prefill after all."""
    return replace(decision, method="full", ratio=1.0, max_charged=None, reason=reason, predicted_kl=0.0)


def settle(
    decision: Decision,
    plan: Plan,
    calibration: Calibration | None,
    found: Found,
    speed: PrefillSpeed,
    *,
    prefix: bool = True,
) -> Decision:
    """Revise an automatic decision by what was loaded, and predict what comes of it.

    Of the settings that keep the quality target over such chunks, and an exact prefix where there is one, the one that
    is predicted to be ready first is taken; full prefill where none is ready sooner by a margin.

    Args:
        decision: what :func:`decide` made of the plan, or :func:`give_up` later.
        plan, calibration: what it was made from.
        found: what was loaded.
        speed: what is known of the time that work takes here.
        prefix: whether the exact prefix alone may be run.
    """
    if decision.automatic and decision.method != "full" and calibration is not None:
        decision = _choose(decision, plan, calibration, found, speed, prefix)
    return replace(decision, predicted_ms=speed.ms(decision, found))


def _choose(
    decision: Decision, plan: Plan, calibration: Calibration, found: Found, speed: PrefillSpeed, prefix: bool
) -> Decision:
    if found.cached == 0:
        return give_up(decision, "no chunk was in the store")
    best = _blend(decision, plan, calibration, found, speed)
    exact = found.cached - round(found.candidates.rows)
    if prefix and exact:
        reason = f"an exact prefix of {exact} tokens loses nothing"
        lossless = Decision("prefix", 0.0, None, True, reason, predicted_kl=0.0)
        # Without a margin: what it computes is a part of full prefill, so that a wrong price is wrong for both.
        if speed.cost(lossless, found) <= speed.cost(best, found):
            best = lossless
    return best if best.method == "full" else _told(best, found, speed)


def _blend(decision: Decision, plan: Plan, calibration: Calibration, found: Found, speed: PrefillSpeed) -> Decision:
    """Return the calibrated setting that is ready first, or full prefill where none fits or pays."""
    cap = decision.max_charged
    assert cap is not None
    variant: StoredVariant = "conditioned" if found.conditioned == 1.0 else "plain"
    fitting = [_at(point, cap) for point in calibration.meeting(cap, plan.max_kl, variant)]
    if not fitting:
        return give_up(decision, _none_fits(plan, cap, f" of {variant} chunks"))
    options = [one for one in fitting if one.budget(found.layers, found.cached).rows(found.probe(one.method).charged)]
    if not options:
        return give_up(decision, f"choosing alone would use up the cap of {cap:g}")
    best = min(options, key=lambda one: speed.cost(one, found))
    full = give_up(decision, "")
    if speed.cost(best, found) >= _WORTH_IT * speed.cost(full, found):
        predicted = _against(best, found, speed) or "less than an eighth of the work"
        return replace(full, reason=f"blending would save too little: {predicted}")
    return best


def _told(decision: Decision, found: Found, speed: PrefillSpeed) -> Decision:
    """Return the decision with the times in its reason."""
    predicted = _against(decision, found, speed)
    return replace(decision, reason=f"{decision.reason}; {predicted}") if predicted else decision


def _against(decision: Decision, found: Found, speed: PrefillSpeed) -> str:
    ms, full_ms = speed.ms(decision, found), speed.full_ms(found.tokens)
    return f"predicted {ms:.0f} ms against {full_ms:.0f}" if full_ms else ""


class PrefillSpeed:
    """Predicts how long requests take, by what a calibration measured here and what passes have taken lately.

    Without a calibration of this machine a pass is priced by its FLOPs, and what these take is learned from the passes
    seen, chunks being encoded among them. One thread tells it of passes; any may ask.

    Args:
        decoder: the model.
        passes: what a pass takes on this machine, where that was measured.
        loads: what loading takes from each tier, likewise.
    """

    def __init__(
        self, decoder: Decoder, passes: PassCost | None = None, loads: Mapping[str, Curve] | None = None
    ) -> None:
        attention = 4.0 * decoder.layers * decoder.heads * decoder.head_dim
        self._by_flops = PassCost(0.0, decoder.linear_flops_per_row, attention)
        self._passes = self._by_flops if passes is None else passes
        self._curves = dict(loads or {})
        self._measured = passes is not None
        self._pace = Running(_TRUSTED if self._measured else 0)
        self._probes: dict[str, Running] = {}
        self._loads: dict[str, Running] = {}

    def flops(self, positions: Iterable[int]) -> float:
        """Return the FLOPs of rows at ``positions``: linear layers, and attention over the keys to their left."""
        return self._by_flops.of(Work.at(positions))

    def saw(self, flops: float, milliseconds: float) -> None:
        """Record a chunk's encoding; it teaches nothing where passes were measured."""
        if not self._measured:
            self._pace.saw(milliseconds, flops)

    def passed(self, work: Work, milliseconds: float) -> None:
        """Record a pass of requests."""
        if work.rows >= _LEAST_ROWS:
            self._pace.saw(milliseconds, self._passes.of(work))

    def chose(self, method: str, work: Work, milliseconds: float) -> None:
        """Record a selector's probe, which does more than a pass with the same rows."""
        if work.rows and self._pace.value:
            predicted = self._pace.value * self._passes.of(work)
            self._probes.setdefault(method, Running(_TRUSTED)).saw(milliseconds, predicted)

    def loaded(self, nbytes: Mapping[str, int], milliseconds: float) -> None:
        """Record what looking up, fetching and placing chunks took; of more tiers than one it cannot be told apart."""
        for tier, size in nbytes.items():
            if len(nbytes) == 1 and size:
                trusted = _TRUSTED if tier in self._curves else 0
                self._loads.setdefault(tier, Running(trusted)).saw(milliseconds, self._curve_ms(tier, size))

    def full_ms(self, tokens: int) -> float:
        """Return the predicted time of a full prefill in milliseconds; 0 while nothing is known."""
        return self._pace.value * self._passes.of(Work.full(tokens))

    def least_ms(self, tokens: int) -> float:
        """Return what a full prefill takes at best, as fast as passes were lately; 0 while nothing is known."""
        return self._pace.least * self._passes.of(Work.full(tokens))

    def ms(self, decision: Decision, found: Found) -> float:
        """Return the predicted time to the first token, queueing left out, in milliseconds; 0 while nothing is known.

        That is loading, choosing and the final pass.
        """
        return self.cost(decision, found) if self._pace.value else 0.0

    def cost(self, decision: Decision, found: Found) -> float:
        """Return what :meth:`ms` does; while nothing is known, FLOPs, by which decisions can still be compared."""
        pace = self._pace.value
        computing, probing = self._passes.of(found.computing(decision)), 0.0
        if (work := found.probing(decision)).rows:
            known = self._probes.get(decision.method)
            probing = self._passes.of(work) * (1.0 if known is None else known.value)
        if not pace:
            return computing + probing
        return pace * (computing + probing) + self._load_ms(found.loading(decision))

    def _load_ms(self, nbytes: Mapping[str, int]) -> float:
        """A tier that nothing was loaded from yet is taken to be as slow as the slowest that is known."""
        known = dict.fromkeys(self._curves, 1.0) | {tier: one.value for tier, one in list(self._loads.items())}
        total = 0.0
        for tier, size in nbytes.items():
            alike = [tier] if tier in known else list(known)
            total += max((known[one] * self._curve_ms(one, size) for one in alike), default=0.0)
        return total

    def _curve_ms(self, tier: str, size: int) -> float:
        """What a tier's curve says; of one that was not measured, its bytes."""
        return self._curves[tier].ms(size) if tier in self._curves else float(size)

"""Calibrations: a model's loss by method and ratio, and the time that its work takes here, measured once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from blend.engine import Engine
from blend.errors import InvalidInput, ResourceExhausted
from blend.eval import curves, fidelity
from blend.eval.datasets import Example
from blend.eval.perf import TIERS, Workload, leave_in
from blend.eval.prompts import chunks_of
from blend.eval.runner import lost, recorded
from blend.eval.stats import Estimate, bootstrap
from blend.eval.values import Record
from blend.names import unknown
from blend.recompute import machine
from blend.recompute.calibration import Calibration, Curve, Point, StoredVariant, selecting
from blend.recompute.cost import PassCost, Work
from blend.recompute.planner import DEFAULT_RATIO
from blend.types import Chunk, Plan, Prompt, Timings

METRICS = ("first_kl", "answer_kl", "top1")
"""What a record must have measured for a calibration."""

_NAMESPACE = "calibration"

_SCATTERED = (0.05, 0.15, 0.4)
"""Shares of a prompt's cached tokens that passes are measured with, besides none and all of them."""


class Setting(NamedTuple):
    """One setting to be measured: a method, its ratio, and how the chunks are stored."""

    method: str
    ratio: float
    variant: StoredVariant = "plain"

    @property
    def condition(self) -> str:
        """What its records have for a condition."""
        return "" if self.variant == "plain" else self.variant


@dataclass(frozen=True)
class Speeds:
    """Times on this machine: of passes by their work, and of loading by bytes for each tier."""

    machine: str
    passes: PassCost
    loads: dict[str, Curve]


def check(methods: Sequence[str]) -> None:
    """Refuse methods that cannot be calibrated.

    Raises:
        InvalidInput: one selects nothing, so that it has no ratio, or is not the engine's own.
    """
    for name in methods:
        if name not in selecting():
            raise unknown("methods", name, selecting())


def measure(
    engine: Engine,
    example: Example,
    prompt: Prompt,
    settings: Sequence[Setting],
    *,
    max_new_tokens: int,
    behind: Mapping[Chunk, Sequence[Chunk]] | None = None,
) -> Iterator[Record]:
    """Hold each setting against full prefill of a prompt; yields a record each, in the order given.

    The ratio is a cap on the charge, probes included, as ``auto`` has it.

    Args:
        behind: what each chunk's conditioned variant is encoded behind, where settings want it.

    Raises:
        ResourceExhausted: the engine's store does not hold all of the prompt's chunks.
    """
    if not settings:
        return
    chunks = chunks_of(prompt)
    engine.precompute(chunks, namespace=_NAMESPACE)
    if any(setting.variant == "conditioned" for setting in settings):
        engine.precompute(chunks, behind=[(behind or {})[chunk] for chunk in chunks], namespace=_NAMESPACE)
    prefill = engine.prefill(prompt, Plan("full"), namespace=_NAMESPACE, reserve=max_new_tokens)
    full = fidelity.full_prefill(engine, prefill, prompt.segments[-1].token_ids, max_new_tokens, attention=False)
    for setting in settings:
        plan = Plan(setting.method, setting.ratio, max_charged=setting.ratio, variant=setting.variant)
        prefill = engine.prefill(prompt, plan, namespace=_NAMESPACE, reserve=max_new_tokens)
        answer = engine.greedy(prefill, max_new_tokens)
        report = prefill.report
        if count := lost(report):  # their loss would be taken for none
            raise ResourceExhausted(f"question {example.id}: the store had no room for {count} of its chunks")
        text, close = engine.tokenizer.decode(answer), fidelity.closeness(engine, prefill, answer, full)
        record = recorded(example, setting.method, setting.ratio, text, close, report)
        yield replace(record, condition=setting.condition)


def points(records: Sequence[Record]) -> tuple[Point, ...]:
    """Return one point a method, ratio and variant, in the order in which they come up.

    Methods without a ratio are left out. A record's condition is its variant; without one its chunks were plain.
    """
    found: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        if record.ratio is not None:
            variant: StoredVariant = "conditioned" if record.condition == "conditioned" else "plain"
            found[Setting(record.method, record.ratio, variant)].append(record)
    return tuple(_point(setting, several) for setting, several in found.items())


def _point(setting: Setting, records: Sequence[Record]) -> Point:
    questions = [record.question for record in records]

    def over(name: str) -> Estimate:
        return bootstrap([record.metrics[name] for record in records], questions)

    first, along, top1 = (over(name) for name in METRICS)
    return Point(
        method=setting.method,
        ratio=setting.ratio,
        variant=setting.variant,
        charged=round(sum(record.charged for record in records) / len(records), 4),
        kl=round(first.mean, 5),
        kl_low=round(first.low, 5),
        kl_high=round(first.high, 5),
        top1=round(top1.mean, 4),
        top1_low=round(top1.low, 4),
        top1_high=round(top1.high, 4),
        answer_kl=round(along.mean, 5),
        answer_kl_low=round(along.low, 5),
        answer_kl_high=round(along.high, 5),
    )


def default_of(found: Sequence[Point]) -> Point:
    """Return the point nearest to the planner's default ratio, of several the one with the least first-token KL.

    Conditioned points count only where there are no plain ones: what is best over plain chunks serves all.

    Raises:
        InvalidInput: there are no points.
    """
    if not found:
        raise InvalidInput("methods", "none", "methods that select, for only they have a ratio to calibrate")
    plain = [point for point in found if point.variant == "plain"] or found
    return min(plain, key=lambda point: (abs(point.ratio - DEFAULT_RATIO), point.kl))


def speeds(
    engine: Engine, workload: Workload, lengths: Sequence[int], repeats: int, tell: Callable[[float], None]
) -> Speeds:
    """Measure passes and loading at prompts of so many tokens.

    Passes are those of full prefill, of plain text alone, and of scattered rows. The best of ``repeats`` counts, so
    that a slow moment of the machine is not taken for the model's speed. Loading is what the look-up, the fetch and
    the placing of chunks take.

    Args:
        engine: with a host and a disk tier.
        tell: told of progress, as a share from 0 to 1.
    """
    tiers = [tier for tier in TIERS if tier == "host" or any(held.name == "disk" for held in engine.store.tiers)]
    plans = [Plan("full"), Plan("reuse"), *(Plan("random", ratio) for ratio in _SCATTERED)]
    passes: dict[Work, float] = {}
    loads: dict[str, dict[int, float]] = {tier: {} for tier in tiers}
    steps = len(lengths) * repeats
    for step in range(steps):
        prompt = workload.sized(lengths[step % len(lengths)])
        engine.precompute(chunks_of(prompt), namespace=_NAMESPACE)
        for plan in plans:  # what was left on disk comes back to the host meanwhile
            report = engine.prefill(prompt, plan, namespace=_NAMESPACE, positions=True).report
            work, ms = Work.at(report.recomputed_positions or ()), _pass_ms(report.timings)
            passes[work] = min(ms, passes.get(work, ms))
        engine.store.wait_idle()
        for tier in tiers:
            leave_in(engine, tier)
            report = engine.prefill(prompt, Plan("reuse"), namespace=_NAMESPACE).report
            nbytes = sum(chunk.nbytes for chunk in report.chunks)
            ms = report.timings.lookup + report.timings.fetch + report.timings.rotate
            if nbytes and {chunk.tier for chunk in report.chunks} == {tier.removesuffix("-cold")}:
                loads[tier][nbytes] = min(ms, loads[tier].get(nbytes, ms))
        tell((step + 1) / steps)
    return Speeds(
        machine=machine.describe(engine.decoder.device, engine.decoder.dtype),
        passes=curves.fit_passes(list(passes.items())),
        loads={
            tier: curves.fit(list(found), list(found.values()), square=False) for tier, found in loads.items() if found
        },
    )


def _pass_ms(timings: Timings) -> float:
    """What a request without a probe took besides loading: its pass, and what comes with any request."""
    return timings.ttft - timings.queue - timings.lookup - timings.fetch - timings.rotate - timings.select


def assemble(model: str, data: str, questions: int, found: Sequence[Point], times: Speeds) -> Calibration:
    """Return the calibration of what was measured; ``data`` tells of which questions."""
    return Calibration(
        model=model,
        data=data,
        questions=questions,
        default=default_of(found),
        points=tuple(found),
        machine=times.machine,
        passes=times.passes,
        loads=times.loads,
    )

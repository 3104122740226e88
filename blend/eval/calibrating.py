"""Calibrations: a model's loss by method and ratio, and the time that its work takes here, measured once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from blend.recompute.calibration import Calibration, Curve, Point, selecting
from blend.recompute.planner import DEFAULT_RATIO
from blend.types import Plan, Prompt

METRICS = ("first_kl", "answer_kl", "top1")
"""What a record must have measured for a calibration."""

_NAMESPACE = "calibration"


@dataclass(frozen=True)
class Speeds:
    """Times on this machine: of full prefill by tokens, and of loading by bytes for each tier."""

    machine: str
    prefill: Curve
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
    engine: Engine, example: Example, prompt: Prompt, points: Sequence[tuple[str, float]], *, max_new_tokens: int
) -> Iterator[Record]:
    """Hold each method and ratio against full prefill of a prompt; yields a record each, in the order given.

    The ratio is a cap on the charge, probes included, as ``auto`` has it.

    Raises:
        ResourceExhausted: the engine's store does not hold all of the prompt's chunks.
    """
    if not points:
        return
    engine.precompute(chunks_of(prompt), namespace=_NAMESPACE)
    prefill = engine.prefill(prompt, Plan("full"), namespace=_NAMESPACE, reserve=max_new_tokens)
    full = fidelity.full_prefill(engine, prefill, prompt.segments[-1].token_ids, max_new_tokens, attention=False)
    for method, ratio in points:
        plan = Plan(method, ratio, max_charged=ratio)
        prefill = engine.prefill(prompt, plan, namespace=_NAMESPACE, reserve=max_new_tokens)
        answer = engine.greedy(prefill, max_new_tokens)
        report = prefill.report
        if count := lost(report):  # their loss would be taken for none
            raise ResourceExhausted(f"question {example.id}: the store had no room for {count} of its chunks")
        text, found = engine.tokenizer.decode(answer), fidelity.closeness(engine, prefill, answer, full)
        yield recorded(example, method, ratio, text, found, report)


def points(records: Sequence[Record]) -> tuple[Point, ...]:
    """Return one point a method and ratio, in the order in which they come up; methods without a ratio are left out."""
    found: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for record in records:
        if record.ratio is not None:
            found[record.method, record.ratio].append(record)
    return tuple(_point(method, ratio, several) for (method, ratio), several in found.items())


def _point(method: str, ratio: float, records: Sequence[Record]) -> Point:
    questions = [record.question for record in records]

    def over(name: str) -> Estimate:
        return bootstrap([record.metrics[name] for record in records], questions)

    first, along, top1 = (over(name) for name in METRICS)
    return Point(
        method=method,
        ratio=ratio,
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

    Raises:
        InvalidInput: there are no points.
    """
    if not found:
        raise InvalidInput("methods", "none", "methods that select, for only they have a ratio to calibrate")
    return min(found, key=lambda point: (abs(point.ratio - DEFAULT_RATIO), point.kl))


def speeds(
    engine: Engine, workload: Workload, lengths: Sequence[int], repeats: int, tell: Callable[[float], None]
) -> Speeds:
    """Measure full prefill and loading at prompts of so many tokens.

    The best of ``repeats`` counts, so that a slow moment of the machine is not taken for the model's speed. Loading is
    what the look-up, the fetch and the placing of chunks add to a request that recomputes nothing else.

    Args:
        engine: with a host and a disk tier.
        tell: told of progress, as a share from 0 to 1.
    """
    tiers = [tier for tier in TIERS if tier == "host" or any(held.name == "disk" for held in engine.store.tiers)]
    full: dict[int, float] = {}
    loads: dict[str, dict[int, float]] = {tier: {} for tier in tiers}
    steps = len(lengths) * repeats
    for step in range(steps):
        prompt = workload.sized(lengths[step % len(lengths)])
        engine.precompute(chunks_of(prompt), namespace=_NAMESPACE)
        report = engine.prefill(prompt, Plan("full"), namespace=_NAMESPACE).report
        full[len(prompt)] = min(report.timings.ttft, full.get(len(prompt), report.timings.ttft))
        engine.prefill(prompt, Plan("reuse"), namespace=_NAMESPACE)  # what was left on disk comes back to the host
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
        prefill=curves.fit(list(full), list(full.values())),
        loads={
            tier: curves.fit(list(found), list(found.values()), square=False) for tier, found in loads.items() if found
        },
    )


def assemble(model: str, data: str, questions: int, found: Sequence[Point], times: Speeds) -> Calibration:
    """Return the calibration of what was measured; ``data`` tells of which questions."""
    return Calibration(
        model=model,
        data=data,
        questions=questions,
        default=default_of(found),
        points=tuple(found),
        machine=times.machine,
        prefill=times.prefill,
        loads=times.loads,
    )

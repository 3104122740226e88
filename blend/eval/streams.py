"""A stream of questions over a corpus, measured for a while and then played on: when chunks computed beforehand pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from time import perf_counter

import numpy as np
import torch

from blend.engine import Engine
from blend.eval import breakeven, curves, zipf
from blend.eval.perf import Bench, Workload, percentiles, point
from blend.eval.prompts import chunks_of
from blend.eval.values import PerfPoint
from blend.recompute import passes
from blend.recompute.planner import PrefillSpeed
from blend.types import EXACT_METHODS, Chunk, Plan, Prompt, Report

_MEGA = 1e6  # FLOPs are fitted by the million, so that they are handy integers


@dataclass(frozen=True)
class Shape:
    """What the streams look like.

    Args:
        questions: different questions that may be asked, most of them never are.
        passages: passages of each.
        requests: most requests that are measured.
        skew: of the measured stream: how much popular questions and passages are preferred, by Zipf's law.
        skews: of the streams that are played from the measured times.
        played: requests of each of these.
        seed: of all draws.
    """

    questions: int = 10_000
    passages: int = 8
    requests: int = 200
    skew: float = 1.0
    skews: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    played: int = 2000
    seed: int = 0


@dataclass
class _Measured:
    """What was timed: chunks by their tokens; requests in their order; full prefill by the question."""

    encoded: list[tuple[int, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    full: list[Report] = field(default_factory=list)
    prefix: list[float] = field(default_factory=list)
    blended: dict[Plan, list[Report]] = field(default_factory=dict)


def measure(
    bench: Bench, workload: Workload, texts: Sequence[str], shape: Shape
) -> tuple[list[PerfPoint], dict[str, object]]:
    """Answer a stream with full prefill, with an ideal exact prefix cache, and with each plan of a bench that blends.

    Each passage is encoded before the first request that finds it, and timed apart. The prefix cache has no limit and
    is never charged for finding or fetching: only the tokens behind what an earlier prompt had too are computed. A
    question's full prefill is measured once.

    Args:
        texts: the questions' texts, taken in turn.

    Returns:
        A point a method, and the break-even: for each plan and each skew what :class:`~blend.eval.breakeven.Balance`
        says, and the skew from which on the prefix cache is as fast.
    """
    blending = [plan for plan in bench.plans if plan.method not in EXACT_METHODS]
    asked = zipf.stream(shape.requests, shape.questions, shape.skew, shape.seed)
    prompts = _prompts(workload, texts, shape, shape.skew, asked)
    found = _ask(bench, blending, prompts, asked)
    bench.tell(1.0)
    once = sum(ms for _, ms in found.encoded)
    points = [
        point("stream", shape.skew, Plan("full"), found.full),
        PerfPoint(
            experiment="stream",
            x=shape.skew,
            method="prefix",
            ratio=None,
            **percentiles(found.prefix),
            throughput=None,
            requests=len(found.prefix),
            timings={"first_token": float(np.mean(found.prefix))},
            detail={"cached": float(np.mean(found.hits)), "hits": sum(found.hits) / sum(found.lengths)},
        ),
    ]
    for plan, reports in found.blended.items():
        points.append(point("stream", shape.skew, plan, reports, detail={"precompute_ms": once}))
    loads = {skew: _load(workload, texts, shape, skew) for skew in shape.skews}
    return points, {
        "questions": shape.questions,
        "passages": len(workload.chunks),
        "passages_each": shape.passages,
        "requests": shape.played,
        "methods": [_balances(bench.engine, found, plan, loads) for plan in blending],
    }


def _prompts(
    workload: Workload, texts: Sequence[str], shape: Shape, skew: float, asked: Sequence[int]
) -> dict[int, Prompt]:
    """Return the prompt of each question that is asked, by the question's number."""
    drawn = zipf.questions(shape.questions, shape.passages, len(workload.chunks), skew, shape.seed)
    return {
        question: workload.build([workload.chunks[i] for i in drawn[question]], texts[question % len(texts)])
        for question in sorted(set(asked))
    }


def _load(workload: Workload, texts: Sequence[str], shape: Shape, skew: float) -> breakeven.Load:
    asked = zipf.stream(shape.played, shape.questions, skew, shape.seed)
    prompts = _prompts(workload, texts, shape, skew, asked)
    chunks = {chunk: len(chunk) for prompt in prompts.values() for chunk in chunks_of(prompt)}
    return breakeven.Load({q: p.token_ids for q, p in prompts.items()}, list(chunks.values()), asked)


def _ask(bench: Bench, plans: Sequence[Plan], prompts: Mapping[int, Prompt], asked: Sequence[int]) -> _Measured:
    """Run requests until the time is over; the first one always is run."""
    engine = bench.engine
    found = _Measured(blended={plan: [] for plan in plans})
    known: dict[Chunk, None] = {}
    full: dict[int, Report] = {}
    suffixes: dict[tuple[int, int], float] = {}
    cache = zipf.PrefixCache()
    begin = perf_counter()
    for done, question in enumerate(asked):
        if done and perf_counter() - begin > bench.seconds:
            break
        prompt = prompts[question]
        for chunk in chunks_of(prompt):
            if chunk not in known:
                started = perf_counter()
                engine.precompute([chunk], namespace="stream")
                found.encoded.append((len(chunk), (perf_counter() - started) * 1e3))
                known[chunk] = None
        if question not in full:
            full[question] = engine.prefill(prompt, Plan("full"), namespace="stream").report
        hit = cache.ask(prompt.token_ids)
        if (question, hit) not in suffixes:
            suffixes[question, hit] = suffix_ms(engine, prompt, hit)
        found.lengths.append(len(prompt))
        found.hits.append(hit)
        found.full.append(full[question])
        found.prefix.append(suffixes[question, hit])
        for plan in plans:
            found.blended[plan].append(engine.prefill(prompt, plan, namespace="stream").report)
        bench.tell(max((done + 1) / len(asked), min(1.0, (perf_counter() - begin) / bench.seconds)))
    return found


def suffix_ms(engine: Engine, prompt: Prompt, hit: int) -> float:
    """Return the milliseconds of prefilling a prompt whose first ``hit`` tokens a prefix cache holds.

    Their KV is taken to be in place, so its values are of no matter to the time: they are 0.
    """
    decoder = engine.decoder
    ids = torch.tensor(prompt.token_ids, device=decoder.device)
    canvas = decoder.new_canvas(len(ids))
    canvas.k[:, :, :hit] = 0
    canvas.v[:, :, :hit] = 0
    passes.synchronize(decoder.device)
    begin = perf_counter()
    rows = torch.arange(hit, len(ids), device=decoder.device)
    int(passes.unstopped(passes.run(decoder, canvas, ids, rows, engine.config.max_rows)).argmax())
    return (perf_counter() - begin) * 1e3


def _balances(engine: Engine, found: _Measured, plan: Plan, loads: Mapping[float, breakeven.Load]) -> dict[str, object]:
    """Play streams over what was measured of one plan."""
    speed = PrefillSpeed(engine.decoder)

    @cache
    def work(start: int, end: int) -> int:
        return max(1, round(speed.flops(range(start, end)) / _MEGA))

    rows = [(0, n, report.timings.ttft) for n, report in zip(found.lengths, found.full, strict=True)]
    rows += list(zip(found.hits, found.lengths, found.prefix, strict=True))
    by_work = curves.fit([work(start, end) for start, end, _ in rows], [ms for *_, ms in rows], square=False)
    blended = curves.fit(found.lengths, [r.timings.ttft for r in found.blended[plan]], square=False)
    encoding = curves.fit([n for n, _ in found.encoded], [ms for _, ms in found.encoded], square=False)
    costs = breakeven.Costs(
        full=lambda tokens: by_work.ms(work(0, tokens)),
        suffix=lambda hit, tokens: by_work.ms(work(hit, tokens)),
        blended=blended.ms,
        precompute=encoding.ms,
    )
    played = [(skew, breakeven.play(load, costs)) for skew, load in loads.items()]
    return {
        "method": plan.method,
        "ratio": plan.ratio,
        "prefix_as_good_from": breakeven.from_where([(skew, b.prefix_as_good) for skew, b in played]),
        "streams": [{"skew": skew, "prefix_as_good": b.prefix_as_good, **asdict(b)} for skew, b in played],
    }

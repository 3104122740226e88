"""The three measurements of ``vllm_ttft.py``: time to first token, inter-token latency, throughput."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from bound import Load, Rate, blended_seconds, decode_seconds, rate_of
from vllm_load import Mix, Request
from vllm_served import Answer, Served, check_blended, check_full

from blend import Plan

STREAMS, STREAM_TOKENS = 4, 128
"""Decoding requests whose tokens are timed, and the length of their prompts."""

SETTLED = 8
"""Tokens that every stream has before its tokens are timed."""

ENDLESS = 1 << 20
"""Tokens of a request that the model's longest ends, if nothing else does."""

STEPS = 24
"""Decode steps that are timed for the bound."""

PARTS = ("waited_ms", "load_ms", "select_ms", "recompute_ms", "paused_ms")
"""Milliseconds of a report: until the request's turn came, of its work, and while the engine's own steps went on."""


@dataclass(frozen=True)
class Pair:
    """One prompt: seconds to the first token at full prefill and blended, and blend's report."""

    full_s: float
    blend_s: float
    report: dict[str, Any]


def tell(line: str) -> None:
    """Write a line of progress. A bar that redraws itself would take its share of the cores."""
    sys.stderr.write(f"{line}\n")


def blended(served: Served, request: Request, plan: Plan) -> tuple[Answer, dict[str, Any]]:
    """Run one blended request by itself; returns the answer and its checked report."""
    answer = served.ask(request.prompt, plan)
    return answer, dict(check_blended(answer, request, plan.method))


def full(served: Served, request: Request) -> Answer:
    """Run one request by itself at full prefill."""
    answer = served.ask(request.prompt, None)
    check_full(answer)
    return answer


def warm_up(served: Served, mix: Mix, plans: Sequence[Plan]) -> None:
    """Have the mix's passages stored, and run every code path once at the mix's length."""
    tell(f"storing {len(mix.pool)} passages of {len(mix.pool[0])} tokens")
    served.fill(mix)
    request = mix.request(-1)
    full(served, request)
    for plan in plans:
        blended(served, request, plan)


def ttft(served: Served, mix: Mix, plans: Sequence[Plan], rounds: int) -> dict[str, list[Pair]]:
    """Full prefill and a blended one of the same prompt in turn, so many times for each plan; by method."""
    found: dict[str, list[Pair]] = {plan.method: [] for plan in plans}
    for number in range(rounds):
        for plan in plans:
            request = mix.request(number)
            full_s = full(served, request).ttft
            answer, report = blended(served, request, plan)
            found[plan.method].append(Pair(full_s, answer.ttft, report))
            tell(f"round {number + 1}: full {full_s:.3f} s, {plan.method} {answer.ttft:.3f} s")
    return found


# ----------------------------------------------------- inter-token latency


@dataclass
class Latencies:
    """Seconds between the tokens of decoding requests, and seconds to the first token of those that arrived meanwhile.

    ``reports`` are of those that were blended.
    """

    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Seconds that so many percent of the gaps stay under."""
        return float(np.percentile(self.gaps, share))


def itl(served: Served, mix: Mix, plan: Plan, rounds: int, arrivals: int, quiet: int) -> dict[str, Latencies]:
    """Inter-token latencies of four decoding requests: by themselves, beside blended requests, beside full prefills.

    The three take turns, each with new streams. Arrivals come one after another, without a pause: the next one is there
    when the last one has ended.
    """
    found = {kind: Latencies() for kind in ("alone", "blend", "full")}
    for number in range(rounds):
        requests = [mix.request(1000 + number * arrivals + arrival) for arrival in range(arrivals)]
        for kind, latencies in found.items():
            streams = _streams(served, mix)
            begun = [len(stream.stamps) - 1 for stream in streams]
            if kind == "alone":
                _until_longer(served, streams, quiet)
            else:
                for request in requests:
                    _beside(served, request, plan if kind == "blend" else None, latencies)
            for stream, at in zip(streams, begun, strict=True):
                if stream.done:
                    raise SystemExit("a decoding request came to the model's longest too early: fewer --arrivals")
                latencies.gaps += [after - before for before, after in pairwise(stream.stamps[at:])]
            served.stop(streams)
            tell(f"round {number + 1}, {kind}: p99 so far {latencies.percentile(99) * 1e3:.1f} ms")
    return found


def _streams(served: Served, mix: Mix) -> list[Answer]:
    """Decoding requests, all of them under way."""
    streams = [served.add(mix.stream(number, STREAM_TOKENS), None, ENDLESS) for number in range(STREAMS)]
    _until_longer(served, streams, SETTLED)
    return streams


def _until_longer(served: Served, streams: Sequence[Answer], tokens: int) -> None:
    """Step until each stream has so many tokens more."""
    wanted = [len(stream.stamps) + tokens for stream in streams]
    served.until(lambda: all(len(s.stamps) >= n or s.done for s, n in zip(streams, wanted, strict=True)))


def _beside(served: Served, request: Request, plan: Plan | None, latencies: Latencies) -> None:
    """Run one request beside the streams."""
    answer = served.add(request.prompt, plan, 2)
    served.until(lambda: answer.done)
    latencies.ttfts.append(answer.ttft)
    if plan is None:
        check_full(answer)
    else:
        latencies.reports.append(dict(check_blended(answer, request, plan.method)))


# -------------------------------------------------------------- throughput


@dataclass(frozen=True)
class Throughput:
    """Seconds of many requests of one mix, at full prefill and blended, and what the bound is made of.

    ``rows_s`` are seconds of the blended requests' rows at full prefill's rate, ``decode_s`` of the decode steps.
    """

    share: float
    full_s: float
    blend_s: float
    rows_s: float
    decode_s: float
    charged_ratio: float
    rows: float

    @property
    def ratio(self) -> float:
        """How many times as fast the blended requests were."""
        return self.full_s / self.blend_s

    @property
    def of_bound(self) -> float:
        """The bound over what was measured."""
        return (self.rows_s + self.decode_s) / self.blend_s


def throughput(served: Served, mix: Mix, plan: Plan, load: Load, rate: Rate, step: float) -> Throughput:
    """A load of one mix at full prefill, then blended.

    ``rate`` and ``step`` are full prefill's rate and the seconds of a decode step, for the bound.
    """
    asked = [mix.request(2000 + number) for number in range(load.requests)]
    full_s, answers = _closed_loop(served, asked, None, load)
    for answer in answers:
        check_full(answer)
    tell(f"{mix.share:.0%} stored: full {full_s:.2f} s")
    blend_s, answers = _closed_loop(served, asked, plan, load)
    reports = [check_blended(a, request, plan.method) for a, request in zip(answers, asked, strict=True)]
    tell(f"{mix.share:.0%} stored: blended {blend_s:.2f} s")
    return Throughput(
        share=mix.share,
        full_s=full_s,
        blend_s=blend_s,
        rows_s=sum(blended_seconds(report, mix.tokens, rate) for report in reports),
        decode_s=decode_seconds(load, step),
        charged_ratio=median(report["charged_ratio"] for report in reports),
        rows=median(len(r["recomputed_positions"]) + mix.tokens - r["computed"] - r["filled"] for r in reports),
    )


def _closed_loop(served: Served, asked: Sequence[Request], plan: Plan | None, load: Load) -> tuple[float, list[Answer]]:
    """Run requests, as many at a time as the load has; returns seconds, and answers in order."""
    waiting, running, answers = deque(asked), list[Answer](), list[Answer]()
    begun = perf_counter()
    while waiting or running:
        while waiting and len(running) < load.concurrency:
            running.append(served.add(waiting.popleft().prompt, plan, load.tokens))
            answers.append(running[-1])
        served.step()
        running = [answer for answer in running if not answer.done]
    seconds = perf_counter() - begun
    served.settle()
    return seconds, answers


def full_rate(served: Served, mix: Mix, rounds: int) -> Rate:
    """Full prefill's own rate, from prompts of a quarter, half and all of the mix's tokens in turn."""
    measured: dict[int, list[float]] = {}
    for number in range(rounds):
        for part in (4, 2, 1):
            tokens = mix.tokens // part
            answer = served.ask(mix.stream(3000 + number, tokens), None)
            check_full(answer)
            measured.setdefault(tokens, []).append(answer.ttft)
    return rate_of({tokens: [median(seconds)] for tokens, seconds in measured.items()})


def decode_step(served: Served, mix: Mix, plan: Plan, concurrency: int) -> float:
    """Seconds of a decode step of so many requests with the mix's prompts, in the median."""
    answers = [served.add(mix.request(4000 + n).prompt, plan, ENDLESS) for n in range(concurrency)]
    served.until(lambda: all(answer.stamps for answer in answers))
    begun = len(answers[0].stamps)
    _until_longer(served, answers[:1], STEPS)
    stamps = answers[0].stamps[begun:]
    served.stop(answers)
    return median(after - before for before, after in pairwise(stamps))

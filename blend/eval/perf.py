"""Time to first token and throughput, experiment by experiment, each within a share of time of its own."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

from blend.config import EngineConfig, GiB, StoreConfig
from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval.datasets import Example
from blend.eval.prompts import chunks_of, layout
from blend.eval.values import PerfPoint
from blend.rag.chunking import render_chunk
from blend.types import EXACT_METHODS, Chunk, Plan, Prompt, Report

HOST_BYTES, DISK_BYTES = 4 * GiB, 64 * GiB
"""Budgets of the tiers, of which no more is taken than chunks are measured."""

TIERS = ("host", "disk", "disk-cold")
"""Where chunks lie before a request: in host memory, on disk with its pages in memory, or on the device alone."""

Experiment = Literal["length", "tier", "hits", "concurrency", "stream"]
Tell = Callable[[float], None]
"""Told how much of an experiment is done, as a share from 0 to 1."""


@dataclass(frozen=True)
class Workload:
    """What prompts are made of: passages as chunks, one question, and the layout around them."""

    chunks: tuple[Chunk, ...]
    question: str
    build: Callable[[Sequence[Chunk], str], Prompt]

    @property
    def most(self) -> int:
        """Tokens of the longest prompt that there are passages for."""
        return self._around + sum(len(chunk) for chunk in self.chunks)

    @property
    def _around(self) -> int:
        return len(self.build([], self.question))

    def fitting(self, lengths: Sequence[int], room: int) -> tuple[int, ...]:
        """Return those prompt lengths that there are passages for and that ``room`` holds; if none, the longest."""
        most = min(self.most, room)
        return tuple(tokens for tokens in lengths if self._around < tokens <= most) or (most,)

    def most_passages(self, questions: Iterable[str], room: int) -> int:
        """Return how many passages, whichever they are, ``room`` tokens hold beside any of the questions."""
        left = room - max(len(self.build([], question)) for question in questions)
        totals = itertools.accumulate(sorted((len(chunk) for chunk in self.chunks), reverse=True))
        return sum(total <= left for total in totals)

    def sized(self, tokens: int) -> Prompt:
        """Return a prompt of exactly so many tokens, its last passage cut; short ones begin as long ones do.

        Raises:
            InvalidInput: the question leaves no room for a passage, or there are too few passages.
        """
        left, kept = tokens - self._around, list[Chunk]()
        if not 1 <= left <= self.most - self._around:
            allowed = f"{self._around + 1} to {self.most}, for which there are passages"
            raise InvalidInput("tokens of a prompt", tokens, allowed)
        for chunk in self.chunks:
            if left <= 0:
                break
            kept.append(Chunk(chunk.token_ids[:left]))
            left -= len(chunk)
        return self.build(kept, self.question)


def workload(engine: Engine, examples: Iterable[Example]) -> Workload:
    """Return the workload of a data set: every distinct passage once, and the first example's question."""
    known = list(examples)
    texts = dict.fromkeys(render_chunk(p.title, p.text) for example in known for p in example.passages)
    chunks = tuple(Chunk(engine.tokenize(text)) for text in texts)
    return Workload(chunks, known[0].question, layout(engine).build)


@contextmanager
def tiered_engine(model: str, dtype: str) -> Iterator[Engine]:
    """Yield an engine with a host tier and a disk tier in a temporary directory, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="blend-eval-") as directory:
        store = StoreConfig(host_bytes=HOST_BYTES, disk_bytes=DISK_BYTES, directory=directory)
        with Engine(EngineConfig(model, dtype=dtype, recompute_misses=False, store=store)) as engine:
            yield engine


def warm_up(engine: Engine, prompt: Prompt, plans: Iterable[Plan]) -> None:
    """Run plans over a prompt with its chunks encoded, so that what first use compiles or allocates is in no figure."""
    engine.precompute(chunks_of(prompt), namespace="warm-up")
    for plan in plans:
        engine.prefill(prompt, plan, namespace="warm-up")


class Bench:
    """Runs the experiments on one engine, whose store should hold nothing else and compute nothing by itself.

    Args:
        engine: with a host and a disk tier, and ``recompute_misses`` off.
        plans: what is measured beside each other, in turns, so that a slow moment of the machine hits them alike.
        repeats: how often each point is measured at most.
        seconds: of each experiment; what has begun is finished, and each point is measured once at least.
        tell: told of progress.
    """

    def __init__(
        self, engine: Engine, plans: Sequence[Plan], *, repeats: int, seconds: float, tell: Tell = lambda share: None
    ) -> None:
        self.engine = engine
        self.plans = tuple(plans)
        self.repeats = repeats
        self.seconds = seconds
        self.tell = tell

    def lengths(self, workload: Workload, lengths: Sequence[int]) -> list[PerfPoint]:
        """Measure prompts of so many tokens, every chunk in host memory."""
        prompts = [(tokens, workload.sized(tokens)) for tokens in lengths]
        for _, prompt in prompts:
            self.engine.precompute(chunks_of(prompt), namespace="length")
        return self._rounds("length", prompts)

    def tiers(self, workload: Workload, tokens: int, tiers: Sequence[str] = TIERS) -> list[PerfPoint]:
        """Measure one prompt with its chunks in each of ``tiers``.

        ``detail`` has the tiers that served. Without :func:`os.posix_fadvise`, or on a file system in memory,
        ``disk-cold`` is as warm as ``disk``.
        """
        prompt = workload.sized(tokens)
        self.engine.precompute(chunks_of(prompt), namespace="tier")
        self.engine.prefill(prompt, Plan("reuse"), namespace="tier")
        return self._rounds("tier", [(tier, prompt) for tier in tiers], lambda tier: leave_in(self.engine, str(tier)))

    def hits(self, workload: Workload, tokens: int, shares: Sequence[float]) -> list[PerfPoint]:
        """Measure one prompt with such shares of its chunks stored; those left out lie spread over the prompt."""
        prompt = workload.sized(tokens)
        chunks = chunks_of(prompt)
        points = []
        for done, share in enumerate(sorted(shares)):  # rising, so that nothing has to be forgotten again
            self.engine.precompute(_spread(chunks, share), namespace="hits")
            points += self._rounds("hits", [(share, prompt)], part=(done, len(shares)))
        return points

    def concurrency(
        self, workload: Workload, tokens: int, threads: Sequence[int], max_new_tokens: int
    ) -> list[PerfPoint]:
        """Answer one prompt from so many threads at once, each with its next request as soon as one is answered."""
        prompt = workload.sized(tokens)
        self.engine.precompute(chunks_of(prompt), namespace="concurrency")
        cells = [(count, plan) for count in threads for plan in self.plans]
        points = []
        for done, (count, plan) in enumerate(cells):
            until = perf_counter() + self.seconds / len(cells)
            begin = perf_counter()
            reports = self._together(prompt, plan, count, until, max_new_tokens)
            rate = len(reports) / (perf_counter() - begin)
            points.append(point("concurrency", count, plan, reports, throughput=rate))
            self.tell((done + 1) / len(cells))
        return points

    def _together(self, prompt: Prompt, plan: Plan, threads: int, until: float, max_new_tokens: int) -> list[Report]:
        """Answer from several threads until a time; every thread answers once at least."""
        stop = threading.Event()

        def ask() -> list[Report]:
            found: list[Report] = []
            while not found or (perf_counter() < until and not stop.is_set()):
                answer = self.engine.generate(prompt, plan=plan, max_new_tokens=max_new_tokens, namespace="concurrency")
                found.append(answer.report)
            return found

        with ThreadPoolExecutor(threads, thread_name_prefix="perf") as pool:
            waiting = [pool.submit(ask) for _ in range(threads)]
            try:
                return [report for future in waiting for report in future.result()]
            finally:
                stop.set()

    def _rounds(
        self,
        experiment: Experiment,
        prompts: Iterable[tuple[float | str, Prompt]],
        prepare: Callable[[Hashable], None] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> list[PerfPoint]:
        """Measure every prompt with every plan, round after round while there is time.

        ``part`` tells which of how many parts of the experiment this is; each has its share of the time.
        """
        done, parts = part
        cells = [(x, prompt, plan) for x, prompt in prompts for plan in self.plans]
        reports: dict[tuple[float | str, Plan], list[Report]] = {(x, plan): [] for x, _, plan in cells}
        until = perf_counter() + self.seconds / parts
        for step, (turn, (x, prompt, plan)) in enumerate(itertools.product(range(self.repeats), cells)):
            if turn and perf_counter() > until:
                break
            if prepare is not None:
                prepare(x)
            reports[x, plan].append(self.engine.prefill(prompt, plan, namespace=experiment).report)
            share = max((step + 1) / (self.repeats * len(cells)), 1 - (until - perf_counter()) * parts / self.seconds)
            self.tell((done + min(1.0, share)) / parts)
        self.tell((done + 1) / parts)
        return [point(experiment, x, plan, found) for (x, plan), found in reports.items()]


def leave_in(engine: Engine, tier: str) -> None:
    """Have the next request find every chunk in one of :data:`TIERS`; those in host memory are left there."""
    if tier == "host":
        return
    engine.store.wait_idle()
    for held in engine.store.tiers:
        if held.name == "host":
            for key in list(held.keys()):
                held.remove(key)
    if tier == "disk-cold":
        drop_pages(engine.config.store.path)


def point(
    experiment: Experiment,
    x: float | str,
    plan: Plan,
    reports: Sequence[Report],
    *,
    throughput: float | None = None,
    detail: Mapping[str, object] | None = None,
) -> PerfPoint:
    """Return what several requests of one kind took: percentiles of TTFT, and the mean of each part of it."""
    parts = [asdict(report.timings) for report in reports]
    served = sorted({chunk.tier for report in reports for chunk in report.chunks if chunk.tier is not None})
    known: dict[str, object] = {
        "tokens": reports[0].tokens,
        "cached": float(np.mean([report.cached for report in reports])),
        "charged": float(np.mean([report.charged_ratio for report in reports])),
        "modes": sorted({report.mode for report in reports}),
        "tiers": [] if plan.method in EXACT_METHODS else served,
    }
    return PerfPoint(
        experiment=experiment,
        x=x,
        method=plan.method,
        ratio=plan.ratio,
        **percentiles([report.timings.ttft for report in reports]),
        throughput=throughput,
        requests=len(reports),
        timings={name: float(np.mean([one[name] for one in parts])) for name in parts[0]},
        detail={**known, **(detail or {})},
    )


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return ``ttft_p50`` and ``ttft_p95``, between two measured values where need be."""
    middle, high = np.percentile(milliseconds, [50, 95])
    return {"ttft_p50": float(middle), "ttft_p95": float(high)}


def _spread(chunks: Sequence[Chunk], share: float) -> list[Chunk]:
    """Return that share of the chunks, so that larger shares hold smaller ones and none is in one place.

    The chunks are ranked by the golden ratio's multiples, which fill an interval evenly from any number of them on.
    """
    ranked = sorted(range(len(chunks)), key=lambda i: (i + 1) * 0.618033988749895 % 1)
    return [chunks[i] for i in ranked[: round(share * len(chunks))]]


def drop_pages(directory: Path) -> bool:
    """Ask the kernel to forget the files under ``directory``, so that reads go to the device.

    Returns whether the system can be asked.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in _files(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())

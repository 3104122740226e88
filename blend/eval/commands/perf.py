"""``blend-eval perf``: time to first token and throughput, and when chunks computed beforehand pay."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blend.engine import Engine
from blend.errors import InvalidInput
from blend.eval import journal, results, streams, zipf
from blend.eval.bars import bar
from blend.eval.measuring import identity, load_dataset
from blend.eval.perf import Bench, Workload, tiered_engine, warm_up, workload
from blend.eval.plan import plan
from blend.eval.prompts import digest
from blend.eval.settings import MeasuringSettings, setting
from blend.eval.values import Perf, PerfPoint, Results
from blend.names import unknown
from blend.recompute import select
from blend.types import Plan
from blend.versions import environment

HELP = "time to first token, throughput, and when computing beforehand pays"

EXAMPLES = """\
blend-eval perf --dataset demo --methods full,reuse,query --results out   # again: goes on
blend-eval perf --dataset questions.json --experiments length,tier --lengths 1024,4096 --seconds 120
blend-eval perf --experiments stream --skew 0.8 --json
"""

EXPERIMENTS = ("length", "tier", "hits", "concurrency", "stream")


@dataclass(frozen=True)
class PerfSettings(MeasuringSettings):
    """Settings of ``perf``.

    Raises:
        InvalidInput: a value outside what is allowed.
    """

    methods: tuple[str, ...] = setting(("reuse", "query"), f"with commas between, of {', '.join(select.methods())}")
    experiments: tuple[str, ...] = setting(EXPERIMENTS, "with commas between")
    seconds: float = setting(60.0, "time of each experiment; each point is measured once at least")
    repeats: int = setting(10, "most measurements of each point")
    lengths: tuple[int, ...] = setting((512, 1024, 2048, 4096), "tokens of the prompts; those that fit are taken")
    tokens: int = setting(1024, "tokens of the prompt of tier, hits and concurrency")
    hits: tuple[float, ...] = setting((0.0, 0.25, 0.5, 0.75, 1.0), "shares of a prompt's chunks that are stored")
    threads: tuple[int, ...] = setting((1, 2, 4), "threads that ask at once")
    questions: int = setting(10_000, "different questions that the stream may ask")
    requests: int = setting(200, "most requests of the stream that are measured")
    skew: float = setting(1.0, "how much the stream prefers popular questions and passages (Zipf's law)")
    skews: tuple[float, ...] = setting((0.0, 0.5, 1.0, 1.5, 2.0), "skews that the stream is played on with")
    played: int = setting(2000, "requests that are played, from measured times")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.experiments:
            if name not in EXPERIMENTS:
                raise unknown("experiments", name, EXPERIMENTS)
        for name in self.methods:
            if name not in select.methods():
                raise unknown("methods", name, select.methods())
        for name in ("repeats", "tokens", "questions", "requests", "played"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "1 or more")
        for name in ("lengths", "threads"):
            if min(getattr(self, name)) < 1:
                raise InvalidInput(name, getattr(self, name), "numbers of 1 or more")
        if not all(0 <= share <= 1 for share in self.hits):
            raise InvalidInput("hits", self.hits, "shares from 0 to 1")
        if not self.seconds > 0:
            raise InvalidInput("seconds", self.seconds, "more than 0")
        for skew in (self.skew, *self.skews):
            zipf.check(skew)


SETTINGS = PerfSettings


def run(settings: PerfSettings, console: Console) -> int:
    """Measure, experiment by experiment, and print tables or the document of results."""
    found = _collect(settings)
    if settings.json:
        sys.stdout.write(results.dumps(found.as_dict()))
    else:
        _show(console, found)
    return 0


def _collect(settings: PerfSettings) -> Results:
    """Run the experiments that the results directory has not; each is written when it is done."""
    dataset = load_dataset(settings)
    plans = [Plan(p.method, p.ratio) for p in plan(settings.methods, settings.ratios)]
    with ExitStack() as stack:
        directory = None if settings.results is None else Path(settings.results).expanduser()
        if directory is not None:
            stack.enter_context(results.held(directory))
        engine = stack.enter_context(tiered_engine(settings.model, settings.dtype))
        load = workload(engine, dataset.examples)
        found = Results(
            kind="perf",
            command=settings.line("perf"),
            settings={**settings.measured(), "digest": dataset.digest},
            environment=environment(engine.stats()),
            identity=identity(engine, settings, dataset, digest([load.sized(load.most)])),
            questions=len(dataset.examples),
            dropped=dataset.dropped,
            seed=settings.seed,
            rows=(),
            records=(),
            perf=Perf(()),
        )
        perf = _earlier(found, directory, settings)
        texts = [example.question for example in dataset.examples]
        if "stream" in settings.experiments:
            _shape(engine, load, texts, settings)  # what cannot be made is refused before anything is measured
        warm_up(engine, load.sized(load.fitting((128,), _room(engine, settings))[0]), plans)
        for name in settings.experiments:
            if any(point.experiment == name for point in perf.points):
                continue
            with bar(name, show=not settings.json) as tell:
                bench = Bench(engine, plans, repeats=settings.repeats, seconds=settings.seconds, tell=tell)
                points, even = _experiment(name, bench, load, texts, settings)
            perf = Perf((*perf.points, *points), even or perf.break_even)
            if directory is not None:
                results.write(directory, replace(found, perf=perf))
    return replace(found, perf=perf)


def _earlier(found: Results, directory: Path | None, settings: PerfSettings) -> Perf:
    """Return what a stopped run has written already.

    Raises:
        InvalidInput: the directory holds other results.
    """
    nothing = Perf(())
    if directory is None or settings.restart:
        return nothing
    records = directory / journal.FILE
    if records.exists() and records.stat().st_size:
        allowed = "another directory, or --restart"
        raise InvalidInput(str(directory), f"another command's records ({journal.FILE})", allowed)
    if not (directory / results.FILE).is_file():
        return nothing
    there = results.read(directory)
    for name in ("kind", "settings", "identity", "environment"):
        if results.dumps(there.as_dict()[name]) != results.dumps(found.as_dict()[name]):
            allowed = "results of the same settings, model and machine, another directory, --restart"
            raise InvalidInput(str(directory), f"results of another {name}", allowed)
    return there.perf or nothing


def _experiment(
    name: str, bench: Bench, load: Workload, texts: list[str], settings: PerfSettings
) -> tuple[list[PerfPoint], dict[str, object] | None]:
    room = _room(bench.engine, settings)
    tokens = min(settings.tokens, load.most, room)
    if name == "length":
        return bench.lengths(load, load.fitting(settings.lengths, room)), None
    if name == "tier":
        return bench.tiers(load, tokens), None
    if name == "hits":
        return bench.hits(load, tokens, settings.hits), None
    if name == "concurrency":
        return bench.concurrency(load, tokens, settings.threads, settings.max_new_tokens), None
    return streams.measure(bench, load, texts, _shape(bench.engine, load, texts, settings))


def _room(engine: Engine, settings: PerfSettings) -> int:
    """Return the tokens that the model has for a prompt."""
    return engine.decoder.max_positions - settings.max_new_tokens


def _shape(engine: Engine, load: Workload, texts: list[str], settings: PerfSettings) -> streams.Shape:
    """Return the stream's shape, each prompt with as many passages as asked for, or as every prompt has room for.

    Raises:
        InvalidInput: there is no room for one.
    """
    room = _room(engine, settings)
    passages = min(settings.passages, load.most_passages(texts, room))
    if passages < 1:
        allowed = f"passages that fit into a prompt of {room} tokens, or other experiments than stream"
        raise InvalidInput("dataset", settings.dataset, allowed)
    return streams.Shape(
        questions=settings.questions,
        passages=passages,
        requests=settings.requests,
        skew=settings.skew,
        skews=settings.skews,
        played=settings.played,
        seed=settings.seed,
    )


_X = {
    "length": "tokens",
    "tier": "chunks in",
    "hits": "stored",
    "concurrency": "threads",
    "stream": "skew",
}


def _show(console: Console, found: Results) -> None:
    perf = found.perf or Perf(())
    about = (
        f"{found.identity.name} ({found.identity.dtype}) on {found.environment.cpu}, "
        f"passages of {found.settings['dataset']}, seed {found.seed}"
    )
    for name in dict.fromkeys(point.experiment for point in perf.points):
        console.print(_points(f"{name}: {about}", [p for p in perf.points if p.experiment == name]))
    if perf.break_even is not None:
        console.print(_break_even(perf.break_even))


def _points(title: str, points: list[PerfPoint]) -> Table:
    parts = ("lookup", "fetch", "rotate", "select", "recompute")
    table = Table(title=title, caption="time to first token in ms, and the means of its parts")
    rates = any(point.throughput is not None for point in points)
    headings = ("method", "ratio", _X[points[0].experiment], "requests", "p50", "p95", *parts)
    for heading in (*headings, *(["requests/s"] if rates else [])):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for p in points:
        times = [f"{p.timings[part]:.1f}" if part in p.timings else "" for part in parts]
        rate = [f"{p.throughput:.2f}" if p.throughput is not None else ""] if rates else []
        x = p.x if isinstance(p.x, str) else f"{p.x:g}"
        ratio = "" if p.ratio is None else f"{p.ratio:g}"
        table.add_row(p.method, ratio, x, str(p.requests), f"{p.ttft_p50:.0f}", f"{p.ttft_p95:.0f}", *times, *rate)
    return table


def _break_even(found: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{found['requests']} requests, played from measured times: {found['questions']} questions over "
        f"{found['passages']} passages, {found['passages_each']} each",
        caption="mean time to first token in ms; a prefix cache without limit, whose look-ups and loads cost nothing; "
        "after how many requests the chunks, computed beforehand, are paid back",
    )
    headings = ("skew", "prefix hits", "full", "prefix", "blended", "chunks, s", "pays against full", "against prefix")
    for heading in ("method", "ratio", *headings):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method in found["methods"]:
        for s in method["streams"]:
            pays = ["never" if s[k] is None else str(s[k]) for k in ("pays_against_full", "pays_against_prefix")]
            table.add_row(
                method["method"],
                "" if method["ratio"] is None else f"{method['ratio']:g}",
                f"{s['skew']:g}",
                f"{s['prefix_hits']:.2f}",
                *(f"{s[k]:.0f}" for k in ("full_ms", "prefix_ms", "blended_ms")),
                f"{s['precompute_ms'] / 1e3:.1f}",
                *pays,
            )
    return table

"""Where the milliseconds of a prefill go. ``ttft.py --profile``.

Named ranges are put around the steps of a request, the model's layers and the kernels for as long as the profile takes;
the product knows nothing of them. The table comes of runs without torch's profiler; a trace comes of one more run under
it, where the ranges stand above torch's own operations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from spans import Recorder, self_times
from workload import check_served, chunks_of, engine, leave_on_disk, machine, plan, prompts, tiers_of, warm_up

from blend import Engine, Plan, Prompt, Report, versions
from blend.chunks import ChunkCache
from blend.filling import Filling
from blend.model.decoder import Decoder
from blend.recompute.assemble import Assembly
from blend.recompute.canvas import Canvas
from blend.recompute.select import Selector

STEPS: tuple[tuple[type, str, str], ...] = (
    (ChunkCache, "find", "lookup"),
    (Filling, "wait", "fetch"),
    (Filling, "settle", "fetch"),
    (Filling, "onto", "rotate"),
    (Canvas, "need", "fetch"),
    (Assembly, "put", "rotate"),
    (Selector, "select", "select"),
    (Decoder, "forward", "pass"),
)
"""The steps of a request: whose method, which one, and the name of its range."""

LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"), "q, k, v projections"),
    **dict.fromkeys(("o_proj", "out_proj"), "output projection"),
    **dict.fromkeys(("mlp", "feed_forward", "block_sparse_moe"), "mlp"),
}
"""What modules are called in transformers' models, and the name of their range."""

KERNELS = {"commit": "commit", "attend": "attention", "mass": "mass", "deviation": "deviation"}
ROTATE = "apply_rotary_pos_emb"
"""The function that turns queries and keys, in most of transformers' modules."""

PARTS = (
    "embeddings",
    "norms",
    "q, k, v projections",
    "rotary",
    "commit",
    "mass",
    "deviation",
    "attention",
    "output projection",
    "mlp",
    "logits",
    "other in the pass",
    "choosing",
)
REQUEST = ("lookup", "fetch", "rotate", "other in the request")
ORDER = tuple(("request", part) for part in REQUEST) + tuple((s, p) for s in ("select", "recompute") for p in PARTS)
"""Sections and parts as the table lists them."""

Parts: TypeAlias = "dict[tuple[str, str], float]"
"""Milliseconds by section and part."""


@contextmanager
def recorded(decoder: Decoder, recorder: Recorder) -> Iterator[None]:
    """Put ranges around the steps of a request, the decoder's layers and its kernels, and take them off again."""
    model: Any = decoder.model
    with ExitStack() as stack:

        def around(owner: Any, name: str, label: str) -> None:
            stack.enter_context(patch.object(owner, name, recorder.around(label, getattr(owner, name))))

        for owner, name, label in STEPS:
            around(owner, name, label)
        for module, label in _labelled(model):
            around(module, "forward", label)
        for name in sorted({type(module).__module__ for module in model.modules()}):
            if hasattr(sys.modules[name], ROTATE):
                around(sys.modules[name], ROTATE, "rotary")
        kernels = decoder.kernels
        names = [field.name for field in fields(kernels) if field.name in KERNELS]
        ranged: dict[str, Any] = {name: recorder.around(KERNELS[name], getattr(kernels, name)) for name in names}
        stack.enter_context(patch.object(decoder, "kernels", replace(kernels, **ranged)))
        yield


def _labelled(model: Any) -> Iterator[tuple[torch.nn.Module, str]]:
    embeddings, logits = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if module is embeddings:
            yield module, "embeddings"
        elif module is logits:
            yield module, "logits"
        elif kind.endswith("Norm"):
            yield module, "norms"
        elif "Rotary" in kind:
            yield module, "rotary"
        elif name.rpartition(".")[2] in LAYERS:
            yield module, LAYERS[name.rpartition(".")[2]]


def place(path: tuple[str, ...]) -> tuple[str, str]:
    """Section and part of a path of ranges, as in :data:`ORDER`."""
    last = path[-1]
    if last in REQUEST:
        return "request", last
    if "select" in path:
        return "select", {"select": "choosing", "pass": "other in the pass"}.get(last, last)
    if "pass" in path:
        return "recompute", "other in the pass" if last == "pass" else last
    return "request", "other in the request"


def milliseconds(times: Mapping[tuple[str, ...], int]) -> Parts:
    """Milliseconds of every section and part that took any, in the table's order, from nanoseconds of paths."""
    found = dict.fromkeys(ORDER, 0.0)
    for path, nanoseconds in times.items():
        found[place(path)] += nanoseconds / 1e6
    return {where: value for where, value in found.items() if value > 0.0}


def run(engine: Engine, prompt: Prompt, wanted: Plan, recorder: Recorder) -> tuple[Parts, Report]:
    """One prefill: the milliseconds of its parts, and its report."""
    recorder.spans.clear()
    with recorder.range("prefill"):
        report = engine.prefill(prompt, wanted).report
    return milliseconds(self_times(recorder.spans)), report


class Profile:
    """Profiles one prompt's prefill on one engine, its chunks in the host tier or on disk.

    Args:
        engine: it, warm.
        prompt: the prompt; its chunks are stored.
        wanted: how to prefill it.
        repeats: how often; the run with the median time counts.
        store: the store's directory.
    """

    def __init__(self, engine: Engine, prompt: Prompt, wanted: Plan, repeats: int, store: Path) -> None:
        self._engine = engine
        self._prompt = prompt
        self._wanted = wanted
        self._repeats = repeats
        self._store = store
        self._recorder = Recorder(engine.decoder.device)

    def bare_ms(self) -> float:
        """Median time to first token from the host tier without any ranges."""
        times = [self._engine.prefill(self._prompt, self._wanted).report.timings.ttft for _ in range(self._repeats)]
        return sorted(times)[(len(times) - 1) // 2]

    def parts(self, tier: str, wanted: Plan | None = None) -> Parts:
        """Milliseconds of the parts, chunks in this tier: ``host`` or ``disk``."""
        found = []
        wanted = wanted or self._wanted
        for _ in range(self._repeats):
            if tier == "disk":
                leave_on_disk(self._engine, self._store)
            with recorded(self._engine.decoder, self._recorder):
                parts, report = run(self._engine, self._prompt, wanted, self._recorder)
            if wanted.method != "full":
                check_served(tiers_of(report), tier, wanted.method)
            found.append(parts)
        self._engine.store.wait_idle()  # what was read is being copied into the host tier
        return sorted(found, key=lambda parts: sum(parts.values()))[(len(found) - 1) // 2]

    def trace(self, path: Path) -> None:
        """Write a Chrome trace of one prefill from the host tier: the ranges, and torch's operations below them."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._engine.decoder.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # The engine computes in a thread of its own.
        everybody = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        self._recorder.traced = True
        try:
            with (
                recorded(self._engine.decoder, self._recorder),
                torch.profiler.profile(activities=activities, experimental_config=everybody) as profiler,
            ):
                run(self._engine, self._prompt, self._wanted, self._recorder)
        finally:
            self._recorder.traced = False
        profiler.export_chrome_trace(str(path))


def table(columns: Mapping[str, Parts], title: str) -> Table:
    """Sections and parts, with milliseconds and share in each column; ``–`` where a part took none."""
    made = Table(title=title)
    made.add_column("")
    made.add_column("part")
    totals = {name: sum(parts.values()) for name, parts in columns.items()}
    for name in columns:
        made.add_column(f"{name}, ms", justify="right")
        made.add_column("%", justify="right")

    def cells(times: Mapping[str, float]) -> list[str]:
        shown = ((times[name], 100 * times[name] / totals[name]) for name in columns)
        return [text for ms, share in shown for text in ((f"{ms:.1f}", f"{share:.1f}") if ms > 0 else ("–", "–"))]

    for section in ("request", "select", "recompute"):
        listed = [where for where in ORDER if where[0] == section and any(where in parts for parts in columns.values())]
        for where in listed:
            lead = section if where == listed[0] else ""
            made.add_row(lead, where[1], *cells({name: parts.get(where, 0.0) for name, parts in columns.items()}))
        if listed:
            sums = {n: sum(ms for where, ms in parts.items() if where[0] == section) for n, parts in columns.items()}
            made.add_row("", f"{section}, in all", *cells(sums), style="bold", end_section=True)
    made.add_row("", "prefill", *cells(totals), style="bold")
    return made


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Profile the first question's prompt, print the table, write the trace; returns the figures."""
    wanted = plan(args.method, args.ratio)
    console = Console(width=110)
    columns: dict[str, Parts] = {}
    with tempfile.TemporaryDirectory() as store, engine(args.model, args.dtype, args.threads, Path(store)) as blend:
        (prompt,) = prompts(blend, args.data, 1, args.passages)
        warm_up(blend)
        blend.precompute(chunks_of(prompt))
        blend.store.wait_idle()
        made = Profile(blend, prompt, wanted, args.repeats, Path(store))
        blend.prefill(prompt, wanted)  # memory costs more when it is used for the first time
        bare = made.bare_ms()
        if wanted.method != "full":
            columns["host"] = made.parts("host")
            if args.trace:
                made.trace(args.trace)
            columns["disk"] = made.parts("disk")
        elif args.trace:
            made.trace(args.trace)
        columns["full"] = made.parts("host", Plan("full"))
        ran_on = versions.as_json(blend.stats())
    first = next(iter(columns))
    name = args.method if wanted.ratio is None else f"{args.method} {args.ratio:g}"
    console.print(table(columns, f"prefill of {len(prompt):,} tokens, {args.model} {args.dtype}, {name}"))
    total = sum(columns[first].values())
    console.print(f"{first} without these ranges: {bare:.1f} ms; they cost {total / bare - 1:+.1%}")
    if args.trace:
        console.print(f"trace of {first}: {args.trace} (chrome://tracing or ui.perfetto.dev)")
    return {
        "benchmark": "ttft-profile",
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "ratio": wanted.ratio,
        "tokens": len(prompt),
        "bare_ms": round(bare, 2),
        "ms": {c: {f"{s}/{p}": round(ms, 3) for (s, p), ms in parts.items()} for c, parts in columns.items()},
        "machine": machine(),
        "environment": ran_on,
    }

"""Time to first token against stock transformers' full prefill, from the host tier and from disk. ``ttft.py``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import ttft_targets
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from workload import (
    check_served,
    chunks_of,
    drop_pages,
    engine,
    leave_on_disk,
    machine,
    plan,
    prompts,
    tiers_of,
    warm_up,
)

from blend import Engine, EngineConfig, Plan, Prompt, Report, versions
from blend.model import source
from blend.recompute.planner import PrefillSpeed
from blend.store import ObjectKey

ATTENTIONS = ("sdpa", "eager")


def stock_model(config: EngineConfig, tokens: int) -> tuple[Any, str]:
    """Stock transformers with the attention that prefills ``tokens`` tokens fastest here, best of two tries each."""
    device = source.pick_device(config.device)
    model = AutoModelForCausalLM.from_pretrained(
        source.resolve(config.model), dtype=source.pick_dtype(config.dtype, device)
    )
    model = model.eval().to(device)
    times = {}
    ids = torch.arange(100, 100 + tokens, device=device)[None] % model.config.vocab_size
    for attention in ATTENTIONS:
        model.set_attn_implementation(attention)
        stock_prefill(model, ids[:, :64])
        times[attention] = min(stock_prefill(model, ids)[0] for _ in range(2))
    best = min(times, key=times.__getitem__)
    model.set_attn_implementation(best)
    return model, best


@torch.inference_mode()
def stock_prefill(model: Any, ids: torch.Tensor) -> tuple[float, int]:
    """Seconds from token ids to the first token, and that token."""
    start = time.perf_counter()
    token = int(model(ids, logits_to_keep=1).logits[0, -1].argmax())
    return time.perf_counter() - start, token


def load_seconds(engine: Engine, report: Report) -> float:
    """Seconds to read the prompt's objects from the disk tier alone, with nothing beside it."""
    (disk,) = [tier for tier in engine.store.tiers if tier.name == "disk"]
    start = time.perf_counter()
    for key in {chunk.key for chunk in report.chunks}:
        lease = disk.get(ObjectKey(key, "plain"))
        if lease is not None:
            with lease:
                lease.payload()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Pair:
    """Seconds of full prefill of one prompt, stock transformers' and then the engine's own."""

    stock_s: float
    own_s: float


@dataclass(frozen=True)
class Warm:
    """One prompt with its chunks in the host tier: seconds of stock transformers, the report, the speed-up that the
    FLOPs allow, and pairs of full prefill."""

    full_s: float
    report: Report
    bound: float
    pairs: list[Pair]


@dataclass(frozen=True)
class Cold:
    """One prompt with its chunks on disk: seconds to the first token and to read the objects alone, the parts of the
    first in milliseconds, and the tiers that served."""

    ttft_s: float
    load_s: float
    parts: dict[str, float]
    tiers: list[str]


def measure(args: argparse.Namespace) -> tuple[list[Warm], list[Cold], str, dict[str, Any]]:
    """What was measured in both processes, one a prompt, the stock model's attention, and what it ran on."""
    with tempfile.TemporaryDirectory() as store:
        measured = []
        with engine(args.model, args.dtype, args.threads, Path(store)) as blend:
            todo = prompts(blend, args.data, args.prompts, args.passages)
            model, attention = stock_model(blend.config, tokens=min(1024, len(todo[0])))
            warm_up(blend)
            for i, prompt in enumerate(todo):
                # A plain line before each prompt: a bar that redraws itself would take its share of the cores.
                sys.stderr.write(f"prompt {i + 1} of {len(todo)}\n")
                blend.precompute(chunks_of(prompt))
                ids = torch.tensor([prompt.token_ids], device=blend.decoder.device)
                full = stock_prefill(model, ids)[0]
                report = blend.prefill(prompt, plan(args.method, args.ratio), positions=True).report
                sys.stderr.write(f"  full {full:.3f} s, host {report.timings.ttft / 1e3:.3f} s\n")
                count = args.own_full // len(todo) + (i < args.own_full % len(todo))
                pairs = [_pair(blend, model, prompt, ids) for _ in range(count)]
                measured.append(Warm(full, report, bound(blend, report), pairs))
            ran_on = versions.as_json(blend.stats())
        del model
        drop_pages(Path(store))
        command = [sys.executable, *sys.argv, "--cold-store", store]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        return measured, [Cold(**json.loads(line)) for line in lines], attention, ran_on


def measure_cold(args: argparse.Namespace) -> Iterator[Cold]:
    """The cold process: one prompt after another, each chunk read from disk."""
    with engine(args.model, args.dtype, args.threads, Path(args.cold_store)) as blend:
        warm_up(blend)
        todo = prompts(blend, args.data, args.prompts, args.passages)
        for number, prompt in enumerate([todo[-1], *todo]):
            leave_on_disk(blend, Path(args.cold_store))
            report = blend.prefill(prompt, plan(args.method, args.ratio)).report
            leave_on_disk(blend, Path(args.cold_store))
            if number:
                timings, tiers = asdict(report.timings), sorted(tiers_of(report))
                yield Cold(report.timings.ttft / 1e3, load_seconds(blend, report), timings, tiers)
                sys.stderr.write(f"  disk {report.timings.ttft / 1e3:.3f} s\n")


def _pair(engine: Engine, model: Any, prompt: Prompt, ids: torch.Tensor) -> Pair:
    """Full prefill by stock transformers, then by the engine."""
    stock = stock_prefill(model, ids)[0]
    own = engine.prefill(prompt, Plan("full")).report.timings.ttft / 1e3
    sys.stderr.write(f"  full prefill: stock {stock:.3f} s, own {own:.3f} s\n")
    return Pair(stock, own)


def bound(engine: Engine, report: Report) -> float:
    """The speed-up over full prefill if a row cost what its FLOPs cost there, whatever else is to be done."""
    speed = PrefillSpeed(engine.decoder)
    rows = speed.flops(report.recomputed_positions or ())
    probe = (report.charged_ratio - report.selected_ratio) * report.cached * speed.flops([report.tokens - 1])
    return speed.flops(range(report.tokens)) / (rows + probe)


def disk_bound(method: str, warm: Warm, cold: Cold) -> float:
    """Seconds that the time to first token from disk should stay under."""
    seconds = warm.report.timings.ttft / 1e3
    if method == "query":
        seconds += max(0.0, cold.load_s - warm.report.timings.select / 1e3)
    return 1.1 * seconds


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], list[ttft_targets.Verdict]]:
    """Measure and print the table; returns the figures and the verdicts on them."""
    warm, cold, attention, ran_on = measure(args)
    for tier, served in (("host", [tiers_of(run.report) for run in warm]), ("disk", [set(run.tiers) for run in cold])):
        check_served(set().union(*served), tier, args.method)
    table = Table(title=f"TTFT, {args.model} {args.dtype}, {args.method} {args.ratio:g}, stock attention: {attention}")
    for column in ("prompt", "tokens", "full s", "host s", "disk s", "× host", "× disk", "bound", "charged"):
        table.add_column(column, justify="right")
    for i, (run, late) in enumerate(zip(warm, cold, strict=True)):
        host, disk = run.report.timings.ttft / 1e3, late.ttft_s
        ratios = (run.full_s / host, run.full_s / disk, run.bound, run.report.charged_ratio)
        row = (i, run.report.tokens, run.full_s, host, disk, *ratios)
        table.add_row(*(str(v) if isinstance(v, int) else f"{v:.3f}" for v in row))
    console = Console(width=110)
    console.print(table)
    pairs = [pair for run in warm for pair in run.pairs]
    for pair in pairs:
        ratio = pair.own_s / pair.stock_s
        console.print(f"full prefill: stock {pair.stock_s:.3f} s, own {pair.own_s:.3f} s, {ratio:.3f} times as long")
    result = {
        "benchmark": "ttft",
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "prompts": len(warm),
        "stock_attention": attention,
        **_figures(warm, cold, args.method),
        "own_full_pairs": len(pairs),
        "own_full": round(median(pair.own_s / pair.stock_s for pair in pairs), 3) if pairs else None,
        "machine": machine(),
        "environment": ran_on,
    }
    return result, ttft_targets.of_comparison(result)


def _figures(warm: list[Warm], cold: list[Cold], method: str) -> dict[str, Any]:
    """Medians over the prompts."""
    timings = [run.report.timings for run in warm]
    host_s, disk_s = [timing.ttft / 1e3 for timing in timings], [run.ttft_s for run in cold]
    full_s = [run.full_s for run in warm]
    bounds = [disk_bound(method, *pair) for pair in zip(warm, cold, strict=True)]
    parts = ("queue", "lookup", "fetch", "rotate", "select", "recompute", "first_token")
    of_disk_bound = median(d / b for d, b in zip(disk_s, bounds, strict=True))
    return {
        "tokens": median(run.report.tokens for run in warm),
        "full_s": round(median(full_s), 4),
        "blend_host_s": round(median(host_s), 4),
        "blend_disk_s": round(median(disk_s), 4),
        "speedup_host": round(median(f / b for f, b in zip(full_s, host_s, strict=True)), 3),
        "speedup_disk": round(median(f / b for f, b in zip(full_s, disk_s, strict=True)), 3),
        "bound": round(median(run.bound for run in warm), 3),
        "of_bound": round(median(run.full_s / host / run.bound for run, host in zip(warm, host_s, strict=True)), 3),
        "select_share": round(median(timing.select / timing.ttft for timing in timings), 4),
        "load_s": round(median(run.load_s for run in cold), 4),
        "disk_bound_s": round(median(bounds), 4),
        "of_disk_bound": round(of_disk_bound, 3),
        "disk_within_bound": of_disk_bound <= 1.0,
        "requested_ratio": warm[0].report.requested_ratio,
        "charged_ratio": round(median(run.report.charged_ratio for run in warm), 4),
        "breakdown_ms": {p: round(median(getattr(timing, p) for timing in timings), 1) for p in parts},
        "breakdown_disk_ms": {p: round(median(run.parts[p] for run in cold), 1) for p in parts},
    }

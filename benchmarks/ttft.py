"""Time to first token: blended prefill from the host tier and from disk, against stock transformers' full prefill.

Each prompt runs in turn in one process: stock transformers (``logits_to_keep=1``, its fastest attention on this
machine), then blend with every chunk in the host tier. Afterwards a new process, whose host tier is empty, reads
the same chunks from disk, their pages dropped from the page cache first. All times count from the prompt's token
ids to the first token, selection and fetch included.

    python benchmarks/ttft.py --data musique_s_100.json --prompts 10 --method query --ratio 0.15

Reading from disk overlaps with computing. ``disk_bound_s`` is what the disk's time should stay under: 1.1 times the
host's, and for a method that reads all that is cached before it chooses, as ``query`` does, with as much added as
loading takes longer than choosing. ``load_s`` is the time that reading the same objects takes by itself.

``--data`` is a JSON list of ``{"question", "ctxs": [{"title", "text"}]}``. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from blend import Chunk, Engine, EngineConfig, Plan, Prompt, RagConfig, Report, StoreConfig
from blend.config import GiB
from blend.model import source
from blend.rag.chunking import render_chunk
from blend.rag.prompt import PromptBuilder
from blend.store import ObjectKey

ATTENTIONS = ("sdpa", "eager")


def prompts(engine: Engine, data: Path, count: int) -> list[Prompt]:
    """Prompts of the first ``count`` questions: every passage a chunk, tokenized on its own."""
    rag = RagConfig()
    builder = PromptBuilder(engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)
    made = []
    for row in json.loads(data.read_text("utf-8"))[:count]:
        texts = [render_chunk(c.get("title") or "", c["text"]) for c in row["ctxs"]]
        made.append(builder.build([Chunk(engine.tokenize(t)) for t in texts], row["question"]))
    return made


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


def drop_pages(directory: Path) -> None:
    """Ask the kernel to forget the files under ``directory``, so that reads go to the device."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_reports(args: argparse.Namespace, store: Path) -> list[dict[str, Any]]:
    """Reports of the same prompts in a process of its own that starts with an empty host tier."""
    drop_pages(store)
    command = [sys.executable, __file__, *sys.argv[1:], "--cold-store", str(store)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def run_cold(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cold process: one report a prompt, each chunk read from disk for the first time."""
    with engine(args, Path(args.cold_store)) as cold:
        warm_up(cold)
        for prompt in prompts(cold, args.data, args.prompts):
            report = cold.prefill(prompt, plan(args)).report
            cold.store.wait_idle()
            drop_pages(Path(args.cold_store))
            sys.stderr.write(f"  disk {report.timings.ttft / 1e3:.3f} s\n")
            yield {**asdict(report), "load_s": load_seconds(cold, report)}
            drop_host(cold)
            drop_pages(Path(args.cold_store))


def drop_host(engine: Engine) -> None:
    """Empty the host tier, since questions share passages: each is to come from disk every time."""
    (host,) = [tier for tier in engine.store.tiers if tier.name == "host"]
    for key in list(host.keys()):
        host.remove(key)


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


def engine(args: argparse.Namespace, store: Path) -> Engine:
    """An engine whose two tiers hold everything this benchmark computes."""
    tiers = StoreConfig(host_bytes=8 * GiB, disk_bytes=64 * GiB, directory=store)
    return Engine(EngineConfig(args.model, dtype=args.dtype, threads=args.threads, recompute_misses=False, store=tiers))


def warm_up(engine: Engine) -> None:
    """Run every code path once on a short prompt that shares nothing with the data."""
    chunks = [Chunk(range(200, 300)), Chunk(range(300, 400))]
    engine.precompute(chunks)
    builder = PromptBuilder(engine.tokenizer, system="", answer_prefix="")
    prompt = builder.build(chunks, "?")
    for method in ("full", "query", "deviation"):
        engine.prefill(prompt, Plan(method))
    engine.forget(chunks)


def plan(args: argparse.Namespace) -> Plan:
    """The plan under test."""
    return Plan(args.method) if args.method in ("auto", "full", "prefix", "reuse") else Plan(args.method, args.ratio)


def machine() -> dict[str, Any]:
    """The machine's name for tables: processor, threads, versions."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": name, "capability": capability, "threads": torch.get_num_threads(), "torch": torch.__version__}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON list of questions with passages")
    parser.add_argument("--prompts", type=int, default=10, help="questions to run (default: %(default)s)")
    parser.add_argument("--method", default="query", help="method of the plan (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of cached tokens (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own)")
    parser.add_argument("--cold-store", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> tuple[list[float], list[Report], list[dict[str, Any]], str]:
    """Stock seconds, host reports and disk reports, one a prompt, and the stock model's attention."""
    with tempfile.TemporaryDirectory() as store:
        full, host = [], []
        with engine(args, Path(store)) as warm:
            todo = prompts(warm, args.data, args.prompts)
            model, attention = stock_model(warm.config, tokens=min(1024, len(todo[0])))
            warm_up(warm)
            for i, prompt in enumerate(todo, 1):
                # A plain line before each prompt: a bar that redraws itself would take its share of the cores.
                sys.stderr.write(f"prompt {i} of {len(todo)}\n")
                warm.precompute(s for s in prompt.segments if isinstance(s, Chunk))
                ids = torch.tensor([prompt.token_ids], device=warm.decoder.device)
                full.append(stock_prefill(model, ids)[0])
                host.append(warm.prefill(prompt, plan(args)).report)
                sys.stderr.write(f"  full {full[-1]:.3f} s, host {host[-1].timings.ttft / 1e3:.3f} s\n")
        del model
        return full, host, cold_reports(args, Path(store)), attention


def disk_bound(method: str, host: Report, load_s: float) -> float:
    """Seconds that the time to first token from disk should stay under."""
    seconds = host.timings.first_token / 1e3
    if method == "query":
        seconds += max(0.0, load_s - host.timings.select / 1e3)
    return 1.1 * seconds


def main() -> None:
    """Measure, then print the table and the JSON line."""
    args = arguments()
    if args.cold_store:
        for report in run_cold(args):
            print(json.dumps(report), flush=True)
        return
    full, host, disk, attention = measure(args)
    host_s = [r.timings.ttft / 1e3 for r in host]
    disk_s = [r["timings"]["first_token"] / 1e3 for r in disk]
    for tier, reports in (("host", [asdict(r) for r in host]), ("disk", disk)):
        tiers = {c["tier"] for report in reports for c in report["chunks"]}
        if tiers != {tier} and args.method not in ("full", "prefix"):
            raise SystemExit(f"chunks were served from {tiers} and not from {tier}: this measures something else")
    table = Table(title=f"TTFT, {args.model} {args.dtype}, {args.method} {args.ratio:g}, stock attention: {attention}")
    for column in ("prompt", "tokens", "full s", "host s", "disk s", "× host", "× disk", "charged"):
        table.add_column(column, justify="right")
    for i, report in enumerate(host):
        ratios = (full[i] / host_s[i], full[i] / disk_s[i])
        row = (i, report.tokens, full[i], host_s[i], disk_s[i], *ratios, report.charged_ratio)
        table.add_row(*(str(v) if isinstance(v, int) else f"{v:.3f}" for v in row))
    Console(width=110).print(table)
    bounds = [disk_bound(args.method, r, d["load_s"]) for r, d in zip(host, disk, strict=True)]
    parts = ("queue", "lookup", "fetch", "rotate", "select", "recompute", "first_token")
    result = {
        "benchmark": "ttft",
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "prompts": len(full),
        "stock_attention": attention,
        "tokens": median(r.tokens for r in host),
        "full_s": round(median(full), 4),
        "blend_host_s": round(median(host_s), 4),
        "blend_disk_s": round(median(disk_s), 4),
        "speedup_host": round(median(f / b for f, b in zip(full, host_s, strict=False)), 3),
        "speedup_disk": round(median(f / b for f, b in zip(full, disk_s, strict=False)), 3),
        "load_s": round(median(d["load_s"] for d in disk), 4),
        "disk_bound_s": round(median(bounds), 4),
        "disk_within_bound": median(d / b for d, b in zip(disk_s, bounds, strict=True)) <= 1.0,
        "requested_ratio": host[0].requested_ratio,
        "charged_ratio": round(median(r.charged_ratio for r in host), 4),
        "breakdown_ms": {p: round(median(getattr(r.timings, p) for r in host), 1) for p in parts},
        "breakdown_disk_ms": {p: round(median(r["timings"][p] for r in disk), 1) for p in parts},
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

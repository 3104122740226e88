"""Time to first token: blended prefill from the host tier and from disk, against stock transformers' full prefill.

Each prompt runs in turn in one process: stock transformers (``logits_to_keep=1``, its fastest attention on this
machine), then blend with every chunk in the host tier. Afterwards a new process, whose host tier is empty, reads
the same chunks from disk, their pages dropped from the page cache before each prompt; it has answered one prompt
before, for memory costs more when it is used for the first time. All times count from the prompt's token ids to the
first token, selection and fetch included.

    python benchmarks/ttft.py --data musique_s_100.json --prompts 10 --method query --ratio 0.15
    python benchmarks/ttft.py --data musique_s_100.json --prompts 1 --passages 3 --own-full 5

``bound`` is how many times as fast as full prefill the request would be if every row cost what its FLOPs cost there:
rows that must be computed, selected ones and those of the method's probe. ``--own-full`` compares the engine's own full
prefill with stock transformers', in turn.

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
from dataclasses import asdict, dataclass
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
from blend.recompute.planner import PrefillSpeed
from blend.store import ObjectKey

ATTENTIONS = ("sdpa", "eager")


def prompts(engine: Engine, data: Path, count: int, passages: int | None) -> list[Prompt]:
    """Prompts of the first ``count`` questions: each of so many passages (all) a chunk, tokenized on its own."""
    rag = RagConfig()
    builder = PromptBuilder(engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)
    made = []
    for row in json.loads(data.read_text("utf-8"))[:count]:
        texts = [render_chunk(c.get("title") or "", c["text"]) for c in row["ctxs"][:passages]]
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


def leave_on_disk(engine: Engine, directory: Path) -> None:
    """Empty the host tier and the page cache, so that every object comes from the device."""
    engine.store.wait_idle()
    (host,) = [tier for tier in engine.store.tiers if tier.name == "host"]
    for key in list(host.keys()):
        host.remove(key)
    drop_pages(directory)


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
    parser.add_argument("--passages", type=int, help="passages of each question (default: all)")
    parser.add_argument(
        "--own-full", type=int, default=0, metavar="PAIRS", help="runs of full prefill, own and stock in turn, a prompt"
    )
    parser.add_argument("--cold-store", help=argparse.SUPPRESS)
    parser.add_argument("--method", default="query", help="method of the plan (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of cached tokens (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own)")
    return parser.parse_args()


@dataclass(frozen=True)
class Warm:
    """One prompt with its chunks in the host tier: seconds of stock transformers, the report, the speed-up that the
    FLOPs allow, and the engine's own full prefill as multiples of stock transformers' time."""

    full_s: float
    report: Report
    bound: float
    own_full: list[float]


@dataclass(frozen=True)
class Cold:
    """One prompt with its chunks on disk: seconds to the first token and to read the objects alone, the parts of the
    first in milliseconds, and the tiers that served."""

    ttft_s: float
    load_s: float
    parts: dict[str, float]
    tiers: list[str]


def measure(args: argparse.Namespace) -> tuple[list[Warm], list[Cold], str]:
    """What was measured in both processes, one a prompt, and the stock model's attention."""
    with tempfile.TemporaryDirectory() as store:
        measured = []
        with engine(args, Path(store)) as blend:
            todo = prompts(blend, args.data, args.prompts, args.passages)
            model, attention = stock_model(blend.config, tokens=min(1024, len(todo[0])))
            warm_up(blend)
            for i, prompt in enumerate(todo, 1):
                # A plain line before each prompt: a bar that redraws itself would take its share of the cores.
                sys.stderr.write(f"prompt {i} of {len(todo)}\n")
                blend.precompute(s for s in prompt.segments if isinstance(s, Chunk))
                ids = torch.tensor([prompt.token_ids], device=blend.decoder.device)
                full = stock_prefill(model, ids)[0]
                report = blend.prefill(prompt, plan(args), positions=True).report
                own = [own_full(blend, model, prompt, ids) for _ in range(args.own_full)]
                measured.append(Warm(full, report, bound(blend, report), own))
                sys.stderr.write(f"  full {full:.3f} s, host {report.timings.ttft / 1e3:.3f} s\n")
        del model
        drop_pages(Path(store))
        command = [sys.executable, __file__, *sys.argv[1:], "--cold-store", store]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        return measured, [Cold(**json.loads(line)) for line in lines], attention


def measure_cold(args: argparse.Namespace) -> Iterator[Cold]:
    """The cold process: one prompt after another, each chunk read from disk."""
    with engine(args, Path(args.cold_store)) as blend:
        warm_up(blend)
        todo = prompts(blend, args.data, args.prompts, args.passages)
        for number, prompt in enumerate([todo[-1], *todo]):
            leave_on_disk(blend, Path(args.cold_store))
            report = blend.prefill(prompt, plan(args)).report
            leave_on_disk(blend, Path(args.cold_store))
            if number:
                timings, tiers = asdict(report.timings), sorted({str(chunk.tier) for chunk in report.chunks})
                yield Cold(report.timings.ttft / 1e3, load_seconds(blend, report), timings, tiers)
                sys.stderr.write(f"  disk {report.timings.ttft / 1e3:.3f} s\n")


def own_full(engine: Engine, model: Any, prompt: Prompt, ids: torch.Tensor) -> float:
    """The engine's full prefill as a multiple of stock transformers' time, one of each."""
    stock = stock_prefill(model, ids)[0]
    return engine.prefill(prompt, Plan("full")).report.timings.ttft / 1e3 / stock


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


def main() -> None:
    """Measure, then print the table and the JSON line."""
    args = arguments()
    if args.cold_store:
        for cold in measure_cold(args):
            print(json.dumps(asdict(cold)), flush=True)
        return
    warm, cold, attention = measure(args)
    host_s, disk_s = [run.report.timings.ttft / 1e3 for run in warm], [run.ttft_s for run in cold]
    full_s, bounds = (
        [run.full_s for run in warm],
        [disk_bound(args.method, *pair) for pair in zip(warm, cold, strict=True)],
    )
    served = {
        "host": {str(c.tier) for run in warm for c in run.report.chunks},
        "disk": {t for run in cold for t in run.tiers},
    }
    for tier, tiers in served.items():
        if tiers != {tier} and args.method not in ("full", "prefix"):
            raise SystemExit(f"chunks were served from {tiers} and not from {tier}: this measures something else")
    table = Table(title=f"TTFT, {args.model} {args.dtype}, {args.method} {args.ratio:g}, stock attention: {attention}")
    for column in ("prompt", "tokens", "full s", "host s", "disk s", "× host", "× disk", "bound", "charged"):
        table.add_column(column, justify="right")
    for i, (run, host, disk) in enumerate(zip(warm, host_s, disk_s, strict=True)):
        ratios = (run.full_s / host, run.full_s / disk, run.bound, run.report.charged_ratio)
        row = (i, run.report.tokens, run.full_s, host, disk, *ratios)
        table.add_row(*(str(v) if isinstance(v, int) else f"{v:.3f}" for v in row))
    Console(width=110).print(table)
    parts = ("queue", "lookup", "fetch", "rotate", "select", "recompute", "first_token")
    result = {
        "benchmark": "ttft",
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "prompts": len(warm),
        "stock_attention": attention,
        "tokens": median(run.report.tokens for run in warm),
        "full_s": round(median(full_s), 4),
        "blend_host_s": round(median(host_s), 4),
        "blend_disk_s": round(median(disk_s), 4),
        "speedup_host": round(median(f / b for f, b in zip(full_s, host_s, strict=True)), 3),
        "speedup_disk": round(median(f / b for f, b in zip(full_s, disk_s, strict=True)), 3),
        "bound": round(median(run.bound for run in warm), 3),
        "of_bound": round(median(run.full_s / host / run.bound for run, host in zip(warm, host_s, strict=True)), 3),
        "own_full": round(median(ratio for run in warm for ratio in run.own_full), 3) if args.own_full else None,
        "load_s": round(median(run.load_s for run in cold), 4),
        "disk_bound_s": round(median(bounds), 4),
        "disk_within_bound": median(d / b for d, b in zip(disk_s, bounds, strict=True)) <= 1.0,
        "requested_ratio": warm[0].report.requested_ratio,
        "charged_ratio": round(median(run.report.charged_ratio for run in warm), 4),
        "breakdown_ms": {p: round(median(getattr(run.report.timings, p) for run in warm), 1) for p in parts},
        "breakdown_disk_ms": {p: round(median(run.parts[p] for run in cold), 1) for p in parts},
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

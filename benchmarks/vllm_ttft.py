"""Blended requests in vLLM beside its own full prefill: time to first token, inter-token latency, throughput.

    python benchmarks/vllm_ttft.py
    python benchmarks/vllm_ttft.py --methods query --only ttft --rounds 9
    python benchmarks/vllm_ttft.py --tokens 1000 --rounds 1 --requests 8 --arrivals 2 --no-gate

**The comparison.** One vLLM with the ``BlendConnector`` serves everything, with the defaults of ``vllm serve``,
greedily, at ``--dtype``. Full prefill is the same prompt, in the same engine, without blend's parameters. Each request
has a cache salt of its own, so neither side finds anything in vLLM's prefix cache; passages are made up, and the
engine itself has stored them before anything is timed. It is checked of every single answer that a full prefill was
spared nothing, and that a blended one got exactly the stored tokens, all from the host tier (there is no other). The
engine runs in this process and is stepped by hand, a token's time being when its step returned: what a server adds is
in no figure.

**ttft**: one request at a time, full and blended in turn, once for each of ``--methods`` in each of ``--rounds``.
Times run from token ids in hand to the first token; ``speedup`` is the median of the pairs' ratios. The first method
named makes ``full_s``, ``blend_s``, ``speedup`` and ``charged_ratio``, and is the one that the other two parts
measure.

**itl**: the time between tokens of four decoding requests, by themselves, while blended requests arrive one after
another without a pause, and while full prefills of the same prompts do. ``itl_p99_ratio`` is the second's 99th
percentile over the first's, ``itl_full_p99_ratio`` the third's.

**throughput**: ``--requests``, ``--concurrency`` at a time, of ``--new-tokens`` each: the seconds of all at full
prefill over those blended, for prompts of which 98 % is stored (``throughput_ratio``) and 90 %
(``throughput_ratio_90``), where the rest is a passage that was not stored.

``of_bound`` holds the mix of 90 % against a bound: what it would take if each row cost what it costs at full prefill.
Full prefill is timed at a quarter, half and all of ``--tokens``, which gives the seconds of a row and of a key that it
attends to, so that rows late in a prompt cost more. Charged at these are each request's text, misses and question, the
selected rows, and the method's probe, as the reports list them; the decode steps behind the first tokens, with all
``--concurrency`` requests in each, are added at their measured time. Loading, choosing, and whatever scattered rows
cost more than neighbouring ones are not in the bound.

Prints tables, then one JSON line. The exit status is 0, or 64 plus the sum of the targets missed, which are those of
``query`` at 0.15 and about 4,000 tokens: 1 speed-up, 2 inter-token latency, 4 throughput, 8 share of the bound.
``--no-gate`` makes it 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ttft_targets
import vllm_figures as figures
import vllm_phases as phases
from bound import Load
from rich.console import Console
from rich.table import Table
from vllm_load import FEW, MOST, Mix
from vllm_served import Served, serve

from blend import Plan, versions
from blend.model import source
from blend.model.tokenizer import Tokenizer

METHODS = ("query", "head", "deviation", "random")
PARTS = ("ttft", "itl", "throughput")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="measure one thing alone")
    parser.add_argument("--tokens", type=int, default=figures.TOKENS, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--ratio", type=float, default=figures.RATIO, help="share of cached tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--methods", default="query,head,deviation", help="of the plans, the first one's figures count (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each method (default: %(default)s)")
    parser.add_argument("--itl-rounds", type=int, default=2, help="turns of latency (default: %(default)s)")
    parser.add_argument("--arrivals", type=int, default=6, help="arrivals in such a turn (default: %(default)s)")
    parser.add_argument("--quiet", type=int, default=256, help="tokens without arrivals in one (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="of the throughput (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="of the throughput (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=8, help="of the throughput (default: %(default)s)")
    parser.add_argument("--passage", type=int, default=500, help="tokens of a passage, about (default: %(default)s)")
    parser.add_argument("--batched-tokens", type=int, help="most tokens of a step (default: vLLM's own)")
    parser.add_argument("--eager", action="store_true", help="leave the model uncompiled (default: vLLM compiles it)")
    parser.add_argument("--no-gate", action="store_true", help="end with status 0 whatever was missed")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    args = parser.parse_args()
    args.methods = list(dict.fromkeys(args.methods.split(",")))
    if unknown := [name for name in args.methods if name not in METHODS]:
        parser.error(f"--methods {unknown[0]}: some of {', '.join(METHODS)}")
    if not 0 < args.ratio <= 1:
        parser.error(f"--ratio {args.ratio:g}: above 0, at most 1")
    for name in ("tokens", "rounds", "itl_rounds", "arrivals", "quiet", "requests", "concurrency", "passage"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is 1 or more")
    if args.new_tokens < 2:
        parser.error("--new-tokens is 2 or more: a request that ends with its first token may have no report")
    return args


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Table]]:
    """Start vLLM and measure what was asked for; returns figures and tables."""
    model = source.resolve(args.model)
    tokenizer = Tokenizer.from_directory(model)
    many, few = (Mix(tokenizer.encode, args.tokens, share, args.passage) for share in (MOST, FEW))
    room = (args.tokens + 512) * max(args.concurrency, phases.STREAMS + 1)
    chunk_tokens = 2 * args.tokens * 2 + args.requests * (args.tokens - int(FEW * args.tokens))
    found: dict[str, Any] = {"tokens": args.tokens}
    tables: list[Table] = []
    with serve(
        model,
        args.model,
        args.dtype,
        room=room,
        chunk_tokens=chunk_tokens,
        batched=args.batched_tokens,
        eager=args.eager,
    ) as served:
        found["engine"] = served.settings()
        found["machine"] = _machine()
        plans = [Plan(method, args.ratio) for method in args.methods]
        phases.warm_up(served, many, plans)
        for part, made, drawn in _parts(args, served, many, few, plans):
            found[part] = made
            tables.append(drawn)
    return found, tables


def _machine() -> dict[str, Any]:
    # Not before vLLM runs: this leads to numba, and vLLM then fails to start.
    from workload import machine

    return machine()


def _parts(
    args: argparse.Namespace, served: Served, many: Mix, few: Mix, plans: Sequence[Plan]
) -> Iterator[tuple[str, dict[str, Any], Table]]:
    """What was measured of each part, by its name, and the table of it."""
    if args.only in (None, "ttft"):
        pairs = phases.ttft(served, many, plans, args.rounds)
        title = f"TTFT, {args.model} {args.dtype}, {args.tokens:,} tokens, ratio {args.ratio:g}"
        made = {method: figures.of_ttft(found) for method, found in pairs.items()}
        yield "ttft", made, figures.ttft_table(title, made)
    if args.only in (None, "itl"):
        latencies = phases.itl(served, many, plans[0], args.itl_rounds, args.arrivals, args.quiet)
        title = f"time between tokens of {phases.STREAMS} decoding requests"
        yield "itl", figures.of_itl(latencies), figures.itl_table(title, latencies)
    if args.only in (None, "throughput"):
        load = Load(args.requests, args.concurrency, args.new_tokens)
        rate = phases.full_rate(served, many, min(args.rounds, 3))
        step = phases.decode_step(served, many, plans[0], args.concurrency)
        phases.warm_up(served, few, plans[:1])
        runs = [phases.throughput(served, mix, plans[0], load, rate, step) for mix in (many, few)]
        title = f"{load.requests} requests of {args.tokens:,} + {load.tokens} tokens, {load.concurrency} at a time"
        yield "throughput", figures.of_throughput(runs, rate, step), figures.throughput_table(title, runs)


def main() -> int:
    """Measure; returns the exit status."""
    args = arguments()
    found, tables = measure(args)
    method = args.methods[0]
    result = {
        "benchmark": "vllm-ttft",
        "model": args.model,
        "dtype": args.dtype,
        "method": method,
        "ratio": args.ratio,
        **figures.summary(found, method),
        **found,
        "environment": versions.as_json(),
    }
    verdicts = figures.verdicts(result)
    console = Console(width=110)
    for table in [*tables, *([ttft_targets.table(verdicts)] if verdicts else [])]:
        console.print(table)
    print(json.dumps({**result, "targets": ttft_targets.as_json(verdicts)}))
    return 0 if args.no_gate else figures.status(verdicts)


if __name__ == "__main__":
    sys.exit(main())

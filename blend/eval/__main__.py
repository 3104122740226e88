"""``blend-eval``: how close blended answers stay to full prefill, and what they cost."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blend.config import EngineConfig, StoreConfig
from blend.engine import Engine
from blend.errors import BlendError, InvalidInput
from blend.eval import datasets
from blend.eval.fidelity import Fidelity, measure
from blend.eval.names import unknown
from blend.eval.stats import Estimate, bootstrap
from blend.recompute.calibration import VERSION
from blend.recompute.select import methods
from blend.types import PLAIN_METHODS, Plan

_EXAMPLES = """examples:
  blend-eval run --dataset demo --methods reuse,deviation,query --ratios 0.15
  blend-eval run --dataset questions.json --limit 20 --ratios 0.05,0.15,0.3 --json
  blend-eval calibrate --dataset demo --output blend_calibration.json
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blend-eval", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="compare methods with full prefill, question by question")
    run.add_argument("--methods", default="reuse,random,head,deviation,query", help="default: %(default)s")
    calibrate = commands.add_parser("calibrate", help="write the calibration file that method auto reads")
    calibrate.add_argument("--methods", default="query,head", help="default: %(default)s")
    calibrate.add_argument(
        "--output", type=Path, required=True, help="the file, blend_calibration.json in a model's directory"
    )
    for command, ratios in ((run, "0.15"), (calibrate, "0.05,0.1,0.15,0.3")):
        command.add_argument("--dataset", default="demo", help="demo, or a JSON file (SQuAD or CacheBlend format)")
        command.add_argument("--ratios", default=ratios, help="shares of cached tokens (default: %(default)s)")
        command.add_argument("--limit", type=int, default=None, help="questions to take (default: all)")
        command.add_argument("--passages", type=int, default=8, help="passages a question (default: %(default)s)")
        command.add_argument("--max-new-tokens", type=int, default=16, help="tokens compared (default: %(default)s)")
        command.add_argument("--seed", type=int, default=0, help="choice and order of passages (default: %(default)s)")
        command.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
        command.add_argument("--dtype", default="auto", help="default: %(default)s")
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    return parser


def plans(names: str, ratios: str, *, capped: bool) -> list[Plan]:
    """Return one plan a method and ratio. ``capped`` holds the charge, probes included, to the ratio."""
    try:
        shares = [float(r) for r in ratios.split(",")]
    except ValueError as error:
        raise InvalidInput("ratios", ratios, "numbers from 0 to 1 with commas between") from error
    made = []
    for name in (n.strip() for n in names.split(",")):
        if name not in methods():
            raise unknown("methods", name, methods())
        if name in (*PLAIN_METHODS, "auto"):
            made.append(Plan(name))
        else:
            made += [Plan(name, r, max_charged=r if capped else None) for r in shares]
    return made


def collect(args: argparse.Namespace, wanted: Sequence[Plan]) -> list[list[Fidelity]]:
    """Measure every plan on every example; returns one list a plan."""
    examples = datasets.load(args.dataset, passages=args.passages, limit=args.limit, seed=args.seed).examples
    found: list[list[Fidelity]] = [[] for _ in wanted]
    # In memory alone: what is measured must not push a user's own chunks out of their store.
    store = StoreConfig(disk_bytes=0)
    with (
        Engine(EngineConfig(args.model, dtype=args.dtype, recompute_misses=False, store=store)) as engine,
        Progress(console=Console(stderr=True), disable=args.json) as progress,
    ):
        for example in progress.track(examples, description="questions"):
            results = measure(engine, example, wanted, max_new_tokens=args.max_new_tokens)
            for kept, result in zip(found, results, strict=True):
                kept.append(result)
    return found


def summary(results: Sequence[Fidelity]) -> dict[str, Any]:
    """Return means and intervals of one plan's results."""
    plan = results[0].plan

    def over(values: Iterable[float]) -> Estimate:
        return bootstrap(list(values))

    return {
        "method": plan.method,
        "ratio": plan.ratio,
        "questions": len(results),
        "first_kl": over(r.first_kl for r in results),
        "answer_kl": over(r.answer_kl for r in results),
        "top1": over(r.top1 for r in results),
        "charged_ratio": sum(r.report.charged_ratio for r in results) / len(results),
        "ttft_ms": median(r.report.timings.ttft for r in results),
        "tokens": median(r.report.tokens for r in results),
    }


def _print_table(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(
        title=f"{args.model} on {args.dataset}: {rows[0]['questions']} questions, seed {args.seed}",
        caption="against full prefill: mean [95% interval], KL in nats; answer KL along full prefill's greedy answer",
    )
    for column in ("method", "ratio", "charged", "first-token KL", "answer KL", "top-1", "TTFT ms"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
        values = (f"{row['charged_ratio']:.3f}", row["first_kl"], row["answer_kl"], row["top1"])
        table.add_row(row["method"], ratio, *(str(v) for v in values), f"{row['ttft_ms']:.0f}")
    Console(width=120).print(table)


def _run(args: argparse.Namespace) -> None:
    rows = [summary(results) for results in collect(args, plans(args.methods, args.ratios, capped=False))]
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k not in ("command", "json")}
        sys.stdout.write(json.dumps({"settings": settings, "rows": rows}, default=vars) + "\n")
    else:
        _print_table(rows, args)


def _calibrate(args: argparse.Namespace) -> None:
    wanted = plans(args.methods, args.ratios, capped=True)
    for plan in wanted:
        if plan.ratio is None:
            raise InvalidInput("methods", plan.method, "methods that select, for only they have a ratio to calibrate")
    if not os.access(args.output.parent, os.W_OK) or args.output.is_dir():
        raise InvalidInput("output", str(args.output), "a file in a directory that can be written to")
    rows = [summary(results) for results in collect(args, wanted)]
    points = [
        {
            "method": row["method"],
            "ratio": row["ratio"],
            "charged": round(row["charged_ratio"], 4),
            "kl": round(row["first_kl"].mean, 5),
            "kl_low": round(row["first_kl"].low, 5),
            "kl_high": round(row["first_kl"].high, 5),
            "top1": round(row["top1"].mean, 4),
        }
        for row in rows
    ]
    default = min(points, key=lambda p: (abs(p["ratio"] - 0.15), p["kl"]))
    written = {
        "version": VERSION,
        "model": args.model,
        "data": f"{Path(args.dataset).name}, {args.passages} passages, seed {args.seed}",
        "questions": rows[0]["questions"],
        "default": {"method": default["method"], "ratio": default["ratio"]},
        "points": points,
    }
    args.output.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    if args.json:
        sys.stdout.write(json.dumps(written) + "\n")
    else:
        _print_table(rows, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 for input that cannot be used."""
    args = _parser().parse_args(argv)
    try:
        {"run": _run, "calibrate": _calibrate}[args.command](args)
    except (BlendError, OSError) as error:
        sys.stderr.write(f"blend-eval: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

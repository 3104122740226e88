"""A real server under load from client processes of this machine: lost or mixed answers, throughput, latency, memory.

    python benchmarks/load.py
    python benchmarks/load.py --only streams --seconds 60
    python benchmarks/load.py --only soak --soak 500 --no-gate

**The server** is ``blend-server`` as it comes, in float32, in a process of its own, on 127.0.0.1, with made-up
documents that it has ingested, so that every passage comes out of host memory. Four client processes speak gRPC to it;
they have the same cores, and what they take is in the figures.

**streams**: ``--streams`` at a time for ``--seconds``, of questions with four passages (about nine tenths of the tokens
are cached; ``cached`` says how many) and 16 new tokens, blended and then at full prefill. Before that each question is
asked alone. Each carries a code; ``mixed`` counts answers that show another question's code, and answers that differ
from the one given alone in a token whose log-probability is 0.001 nats or more away, as an engine here finds.
``errors`` counts calls that failed and answers that were lost, of all parts. ``of_bound`` is the throughput over what
the rows alone allow: full prefill's own rate is fitted to prompts of two lengths (seconds a row, and a key that it
attends to), and mandatory, selected and probe rows are charged at it by their positions, decoded tokens at what
``--streams`` streams decode when nothing else goes on. ``ttft_p95_ratio`` is blended over full.

**cached**: 16 at a time with eight passages and 8 new tokens (``mostly_cached``): ``throughput_ratio`` is the time of
all at full prefill over that of all blended.

**decoding**: tokens a second of 16 streams while all of them decode, over those of one alone (``decode_batch_gain``).

**soak**: ``--soak`` small requests, of which every twentieth is left at its first token. ``soak_growth`` is the
server's resident memory in the last fifth of the time over the second fifth, less 1.

**overload**: a server with 16 places gets ``--overload`` requests at four times the rate that it answers when its
places are always taken: ``overload_ttft_ratio`` is the 95th percentile of the accepted ones' TTFT over that at
capacity, ``refusal_p99_ms`` how long the others waited for their refusal.

Prints a table, then one JSON line. The exit status is 0, or 64 plus the sum of the targets missed: 1 errors or mixed
answers, 2 share of the bound, 4 TTFT, 8 throughput, 16 decoding, 32 soak or overload. ``--no-gate`` makes it 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import load_phases as phases
import ttft_targets
from load_checks import Referee
from load_phases import Figures, Sizes
from load_server import fill, serve
from rich.console import Console
from rich.table import Table
from ttft_targets import MISSED, Verdict

from blend import versions

PARTS = (*phases.PARTS, "overload")

PLACES = 16
"""Of the server that is overloaded: requests that it takes at a time."""

BITS = {"answers": 1, "of bound": 2, "TTFT": 4, "throughput": 8, "decoding": 16, "steady": 32}

TARGETS = (
    ("of bound", "of_bound", ">=", 0.6),
    ("TTFT", "ttft_p95_ratio", "<=", 0.5),
    ("throughput", "throughput_ratio", ">=", 2.5),
    ("decoding", "decode_batch_gain", ">=", 4.0),
    ("steady", "soak_growth", "<=", 0.03),
    ("steady", "overload_ttft_ratio", "<=", 1.5),
)
"""Which target goes by which figure."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="measure one part alone")
    for field in fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        kind = float if field.name == "seconds" else int
        parser.add_argument(flag, type=kind, default=field.default, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--method", default="query", help="of blended requests, at 0.15 (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="mixed answers are told in float32 alone (%(default)s)")
    parser.add_argument("--no-gate", action="store_true", help="end with status 0 whatever was missed")
    args = parser.parse_args()
    for field in fields(Sizes):
        if getattr(args, field.name) < 1:
            parser.error(f"--{field.name.replace('_', '-')} is 1 or more")
    return args


def measure(args: argparse.Namespace, directory: Path) -> Figures:
    """Run the parts that were asked for."""
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    flags = ["--model", args.model, "--dtype", args.dtype, "--host-bytes", "2GiB", "--disk-bytes", "4GiB"]
    flags += ["--neighbours", "0"]  # or documents would be worked on beside the questions
    figures, wanted = Figures(), [args.only] if args.only else PARTS
    answers: Any = None
    with serve(directory, [*flags, "--max-queue", str(max(64, sizes.streams))]) as server:
        fill(server)
        for part, run in phases.PARTS.items():
            if part in wanted:
                answers = run(server, sizes, args.method, figures) or answers
    if "overload" in wanted:
        with serve(directory, [*flags, "--max-queue", str(PLACES - 1)]) as server:
            fill(server)
            phases.overload(server, PLACES, sizes, args.method, figures)
    if answers is not None:
        _judge(args, directory, figures, *answers)
    figures.found["errors"] = len(figures.errors)
    return figures


def _judge(args: argparse.Namespace, directory: Path, figures: Figures, asks: Any, alone: Any, differing: Any) -> None:
    """Tell answers that were mixed from those that rounding has changed."""
    others = [(ask, answer) for ask, answers in differing.items() for answer in answers]
    near = 0
    if args.dtype == "float32" and others:
        referee = Referee(args.model, directory / "referee")
        near = sum(referee.near(asks[ask], alone[ask], answer) for ask, answer in others)
        referee.close()
        figures.found["mixed"] = figures.found["foreign"] + len(others) - near
    else:
        figures.found["mixed"] = figures.found["foreign"]
    figures.found |= {"differing": len(others), "near_ties": near}


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    """The targets of what was measured."""
    made = [Verdict("answers", f"{found['errors']} errors", "none", found["errors"] == 0)]
    if "mixed" in found:
        made.append(Verdict("answers", f"{found['mixed']} mixed", "none", found["mixed"] == 0))
    for target, name, relation, bound in TARGETS:
        if (value := found.get(name)) is not None:
            met = value >= bound if relation == ">=" else value <= bound
            made.append(Verdict(target, f"{value:.3f}", f"{name} {relation} {bound:g}", met))
    return made


def main() -> int:
    """Measure; returns the exit status."""
    args = arguments()
    with TemporaryDirectory() as directory:
        figures = measure(args, Path(directory))
    table = Table(title=f"{args.model} {args.dtype}, {args.method} at 0.15 under load")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    for name, value in figures.found.items():
        table.add_row(name, f"{value:g}")
    judged = verdicts(figures.found)
    console = Console(width=110)
    for shown in (table, ttft_targets.table(judged)):
        console.print(shown)
    for error in figures.errors[:10]:
        console.print(error, markup=False)
    result = {"benchmark": "load", "model": args.model, "dtype": args.dtype, "method": args.method, **figures.found}
    print(json.dumps({**result, "environment": versions.as_json(), "targets": ttft_targets.as_json(judged)}))
    missed = {verdict.target for verdict in judged if not verdict.met}
    return 0 if args.no_gate or not missed else MISSED + sum(BITS[target] for target in missed)


if __name__ == "__main__":
    sys.exit(main())

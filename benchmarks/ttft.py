"""Time to first token: blended prefill from the host tier and from disk, against stock transformers' full prefill.

    python benchmarks/ttft.py --data musique_s_100.json --prompts 10 --method query --ratio 0.15
    python benchmarks/ttft.py --data musique_s_100.json --prompts 1 --passages 3 --own-full 5
    python benchmarks/ttft.py --data musique_s_100.json --sweep --dtype float32 --method head
    python benchmarks/ttft.py --data musique_s_100.json --profile --trace trace.json

**The comparison.** Each prompt runs in turn in one process: stock transformers (``logits_to_keep=1``, its fastest
attention on this machine), then blend with every chunk in the host tier. Afterwards a new process, whose host tier is
empty, reads the same chunks from disk, their pages dropped from the page cache before each prompt; it has answered one
prompt before, for memory costs more when it is used for the first time. All times count from the prompt's token ids to
the first token, selection and fetch included. ``--threads`` is torch's; blend's store reads and places with one thread
more.

``bound`` is how many times as fast as full prefill the request would be if every row cost what its FLOPs cost there:
rows that must be computed, selected ones and those of the method's probe. ``--own-full`` compares the engine's own full
prefill with stock transformers', in turn, so many pairs in all, spread over the prompts.

Reading from disk overlaps with computing. ``disk_bound_s`` is what the disk's time should stay under: 1.1 times the
host's, and for a method that reads all that is cached before it chooses, as ``query`` does, with as much added as
loading takes longer than choosing. ``load_s`` is the time that reading the same objects takes by itself.

**--sweep** runs prompts of the lengths ``--tokens`` at each of ``--ratios``, mixed from the passages of many questions,
and fits with what their time grows; it draws that as a PNG (needs matplotlib, which is in the ``eval`` extra).

**--profile** tells where the milliseconds of one prefill go: chunks in the host tier, on disk, and the engine's own
full prefill; with ``--trace`` it also writes a Chrome trace.

``--data`` is a JSON list of ``{"question", "ctxs": [{"title", "text"}]}``. Prints tables, then one JSON line. The exit
status is 0, or 64 plus the sum of the targets missed of those that apply: 1 speed-up over stock full prefill (1,700 and
5,700 tokens, ratio 0.15), 2 share of the bound, 4 own full prefill against stock's, 8 the time of selecting (``query``,
5,700 tokens), 16 disk against the host, 32 growth of a sweep's cost. ``--no-gate`` makes it 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ttft_targets
from rich.console import Console
from ttft_compare import compare, measure_cold
from ttft_profile import profile
from ttft_sweep import sweep

from blend.recompute.select import methods
from blend.types import PLAIN_METHODS


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--sweep", action="store_true", help="time against tokens and ratios instead")
    modes.add_argument("--profile", action="store_true", help="where the milliseconds of one prefill go instead")
    modes.add_argument("--cold-store", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, required=True, help="JSON list of questions with passages")
    parser.add_argument("--prompts", type=int, default=10, help="questions to compare (default: %(default)s)")
    parser.add_argument("--passages", type=int, help="passages of each question (default: all)")
    parser.add_argument(
        "--own-full", type=int, default=0, metavar="PAIRS", help="runs of full prefill, own and stock in turn, in all"
    )
    parser.add_argument("--method", default="query", help="method of the plan (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of cached tokens (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=_listed(int), default="1000,2000,4000,8000", help="lengths of the sweep (default: %(default)s)"
    )
    parser.add_argument(
        "--ratios", type=_listed(float), default="0,0.05,0.15,0.3,0.6,1", help="of the sweep (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help="runs of each cell, of which the fastest counts (default: 2); of each profile, of "
        "which the median counts (default: 3)",
    )
    parser.add_argument("--plot", type=Path, default=Path("ttft_sweep.png"), help="PNG (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="Chrome trace of the profile, a JSON file (default: none)")
    parser.add_argument("--no-gate", action="store_true", help="end with status 0 whatever was missed")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own)")
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 2 if args.sweep else 3
    if args.method not in methods():
        parser.error(f"--method {args.method}: one of {', '.join(methods())}")
    if args.sweep and args.method in ("auto", *PLAIN_METHODS):
        parser.error(f"--method {args.method} takes no ratio; a sweep needs one that selects")
    if args.sweep and len(args.tokens) * len(args.ratios) < 5:
        parser.error("--tokens and --ratios make fewer than 5 cells, too few for a fit")
    if args.sweep and (len(args.tokens) < 2 or len(args.ratios) < 2):
        parser.error("--tokens and --ratios: two or more of each, or there is nothing to grow with")
    for share in (args.ratio, *args.ratios):
        if not 0 <= share <= 1:
            parser.error(f"--ratio and --ratios: {share:g} is not from 0 to 1")
    if args.plot.suffix != ".png":
        parser.error(f"--plot {args.plot}: a name that ends in .png")
    for flag, path in (("--plot", args.plot if args.sweep else None), ("--trace", args.trace)):
        if path is not None and not os.access(path.parent, os.W_OK):
            parser.error(f"{flag} {path}: a file in a directory that can be written to")
    if args.trace and not args.profile:
        parser.error("--trace is for --profile")
    if args.passages is not None and args.passages < 1:
        parser.error(f"--passages {args.passages}: 1 or more")
    if args.prompts < 1 or args.repeats < 1 or args.own_full < 0:
        parser.error("--prompts and --repeats are 1 or more, --own-full is 0 or more")
    return args


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argument type: numbers separated by commas, in ascending order."""

    def parse(text: str) -> list[Any]:
        return sorted({kind(part) for part in text.split(",")})

    return parse


def main() -> int:
    """Run the mode that was asked for; returns the exit status."""
    args = arguments()
    if args.cold_store:
        for cold in measure_cold(args):
            print(json.dumps(asdict(cold)), flush=True)
        return 0
    verdicts: list[ttft_targets.Verdict] = []
    if args.profile:
        result = profile(args)
    else:
        result, verdicts = sweep(args) if args.sweep else compare(args)
    if verdicts:
        Console(width=110).print(ttft_targets.table(verdicts))
    print(json.dumps({**result, "targets": ttft_targets.as_json(verdicts)}))
    return 0 if args.no_gate else ttft_targets.status(verdicts)


if __name__ == "__main__":
    sys.exit(main())

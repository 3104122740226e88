"""``auto`` on questions with passages: what it chooses, what that loses and saves, and how well it predicts both.

    python benchmarks/auto.py --data xquad.en.dev.json --questions 40 --max-kl 0.02
    python benchmarks/auto.py --data musique.jsonl --questions 20 --max-kl 0.02 --stored conditioned

Each question runs ``--repeats`` times in turn at full prefill and as ``auto`` with ``max_kl``, its chunks in host
memory, stored ``plain``, or ``conditioned`` behind the ``--neighbours`` nearest passages of the data set as well. The
best time of each counts, so that a slow moment of the machine is not taken for the choice's fault. Times are TTFT:
look-up, fetch, choosing and the final pass, from token ids to the first token.

**Loss** is KL(full ‖ auto) in nats: of the first token, and along full prefill's greedy answer of ``--max-new-tokens``
tokens. Answers that ``auto`` left to full prefill or an exact prefix lose nothing; ``kl_blended`` leaves them out.

**Predictions** are the report's: the time of what was chosen, against what it took without queueing, run by run; and
the calibrated mean KL, against the measured mean over the same answers. The calibration is the model's own, so data
that it was not made of is what tells.

``--data`` is whatever ``blend-eval run --dataset`` takes. Prints a table, then one JSON line. The exit status is 0, or
64 plus the sum of the targets missed: 1 the mean first-token KL of blended answers keeps ``--max-kl``, 2 no question is
more than 5% slower than full prefill, 4 half of the predictions are within 20%. ``--no-gate`` makes it 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import ttft_targets
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from ttft_targets import MISSED, Verdict
from workload import chunks_of, engine, machine, warm_up

from blend import Chunk, Engine, Plan, Report, versions
from blend.eval import datasets, fidelity
from blend.eval.neighbours import NEIGHBOURS, behind, nearest
from blend.eval.prompts import Asked, prepare
from blend.eval.stats import bootstrap
from blend.rag.embedding import Embedder
from blend.types import EXACT_METHODS

BITS = {"quality": 1, "slower": 2, "predictions": 4}

SLOWER, WITHIN = 1.05, 0.2
"""Most that ``auto`` may take of full prefill's time, and how far off half of the predictions may be."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="file or name of a data set with passages")
    parser.add_argument("--questions", type=int, default=40, help="spread over the data (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=8, help="of each, where the data leaves it (%(default)s)")
    parser.add_argument("--max-kl", type=float, default=0.02, help="the quality target in nats (default: %(default)s)")
    parser.add_argument("--max-charged", type=float, help="cap on the charged share (default: auto's own)")
    parser.add_argument("--stored", choices=("plain", "conditioned"), default="plain", help="default: %(default)s")
    parser.add_argument("--neighbours", type=int, default=NEIGHBOURS, help="of conditioned chunks (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each question (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of answers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of passages (default: %(default)s)")
    parser.add_argument("--no-gate", action="store_true", help="end with status 0 whatever was missed")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own)")
    args = parser.parse_args()
    for name in ("questions", "passages", "neighbours", "repeats", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is 1 or more")
    if not args.max_kl >= 0:
        parser.error(f"--max-kl {args.max_kl:g} is not 0 or more")
    if args.max_charged is not None and not 0 <= args.max_charged <= 1:
        parser.error(f"--max-charged {args.max_charged:g} is not from 0 to 1")
    return args


@dataclass(frozen=True)
class Run:
    """One question: all reports of full prefill and of ``auto``, and the last answer's KL in nats."""

    question: str
    full: Sequence[Report]
    auto: Sequence[Report]
    first_kl: float
    answer_kl: float

    @property
    def report(self) -> Report:
        """Of the run that the KL was measured of."""
        return self.auto[-1]

    @property
    def full_ms(self) -> float:
        """The best TTFT of full prefill."""
        return min(report.timings.ttft for report in self.full)

    @property
    def auto_ms(self) -> float:
        """The best TTFT of ``auto``."""
        return min(report.timings.ttft for report in self.auto)


def measure(args: argparse.Namespace) -> tuple[list[Run], dict[str, Any]]:
    """What was measured, and what it ran on."""
    dataset = datasets.load(args.data, passages=args.passages, limit=args.questions, seed=args.seed)
    with tempfile.TemporaryDirectory() as store, engine(args.model, args.dtype, args.threads, Path(store)) as blend:
        if blend.calibration is None:
            raise SystemExit(f"{args.model} has no calibration, so that auto is full prefill: see blend-eval calibrate")
        prepared = prepare(blend, dataset.examples, max_new_tokens=args.max_new_tokens)
        near: dict[Chunk, tuple[Chunk, ...]] = {}
        if args.stored == "conditioned":
            passages = [passage for example in dataset.examples for passage in example.passages]
            near = behind(blend, nearest(passages, Embedder(), args.neighbours))
        warm_up(blend)
        found = []
        for number, one in enumerate(prepared.asked):
            # A plain line before each question: a bar that redraws itself would take its share of the cores.
            sys.stderr.write(f"question {number + 1} of {len(prepared.asked)}\n")
            found.append(_run(args, blend, one, near))
        return found, versions.as_json(blend.stats())


def _run(args: argparse.Namespace, blend: Engine, one: Asked, near: Mapping[Chunk, Sequence[Chunk]]) -> Run:
    chunks = chunks_of(one.prompt)
    blend.precompute(chunks)
    if near:
        blend.precompute(chunks, behind=[near[chunk] for chunk in chunks])
    plan = Plan(max_kl=args.max_kl, max_charged=args.max_charged)
    full, auto = [], []
    for _ in range(args.repeats):
        plain = blend.prefill(one.prompt, Plan("full"), reserve=args.max_new_tokens)
        chosen = blend.prefill(one.prompt, plan, reserve=args.max_new_tokens)
        full.append(plain.report)
        auto.append(chosen.report)
    question = one.prompt.segments[-1].token_ids
    held = fidelity.full_prefill(blend, plain, question, args.max_new_tokens, attention=False)
    close = fidelity.closeness(blend, chosen, blend.greedy(chosen, args.max_new_tokens), held)
    return Run(one.example.id, full, auto, close["first_kl"], close["answer_kl"])


def errors(reports: Sequence[Report]) -> Iterator[float]:
    """How far each predicted time was from the measured one, as a share of it; without predictions none."""
    for report in reports:
        if report.predicted_ms > 0:
            yield abs(report.predicted_ms / (report.timings.ttft - report.timings.queue) - 1)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that is made of the measurements."""
    blended = [run for run in runs if run.report.mode not in EXACT_METHODS]
    kl = bootstrap([run.first_kl for run in runs])
    slower = [run.auto_ms / run.full_ms for run in runs]
    found: dict[str, Any] = {
        "questions": len(runs),
        "tokens": median(run.report.tokens for run in runs),
        "modes": dict(Counter(run.report.mode for run in runs)),
        "ratios": dict(Counter(f"{run.report.mode} {run.report.requested_ratio:g}" for run in runs)),
        "charged": mean(run.report.charged_ratio for run in blended) if blended else None,
        "kl_first": kl.mean,
        "kl_first_low": kl.low,
        "kl_first_high": kl.high,
        "kl_answer": mean(run.answer_kl for run in runs),
        "kl_blended": mean(run.first_kl for run in blended) if blended else None,
        "kl_blended_predicted": mean(run.report.predicted_kl or 0.0 for run in blended) if blended else None,
        "full_ms": median(run.full_ms for run in runs),
        "auto_ms": median(run.auto_ms for run in runs),
        "auto_over_full": median(slower),
        "auto_over_full_worst": max(slower),
    }
    for name, reports in (
        ("auto", [report for run in runs for report in run.auto]),
        ("full", [report for run in runs for report in run.full]),
    ):
        off = list(errors(reports))
        found[f"{name}_error"] = median(off) if off else None
        found[f"{name}_within"] = mean(one <= WITHIN for one in off) if off else None
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in found.items()}


def verdicts(found: Mapping[str, Any], max_kl: float) -> list[Verdict]:
    """The targets of what was measured; without a blended answer there is no loss to judge."""
    made = []
    if (kl := found["kl_blended"]) is not None:
        made.append(Verdict("quality", f"{kl:.4f}", f"mean KL of blended answers ≤ {max_kl:g}", kl <= max_kl))
    worst, off = found["auto_over_full_worst"], found["auto_error"]
    made.append(Verdict("slower", f"{worst:.3f}", f"auto ≤ {SLOWER:g} × full, every question", worst <= SLOWER))
    said = "none" if off is None else f"{off:.1%} off"
    made.append(Verdict("predictions", said, f"half of them within {WITHIN:.0%}", off is not None and off <= WITHIN))
    return made


def main() -> int:
    """Measure; returns the exit status."""
    args = arguments()
    runs, ran_on = measure(args)
    found = figures(runs)
    judged = verdicts(found, args.max_kl)
    table = Table(title=f"auto, max_kl {args.max_kl:g}, {args.stored} chunks, {args.model} {args.dtype}")
    for column in (
        "question",
        "tokens",
        "chosen",
        "full ms",
        "auto ms",
        "auto/full",
        "predicted ms",
        "KL",
        "predicted",
    ):
        table.add_column(column, justify="left" if column in ("question", "chosen") else "right")
    for run in runs:
        report = run.report
        kl = "–" if report.predicted_kl is None else f"{report.predicted_kl:.4f}"
        chosen = f"{report.mode} {report.requested_ratio:g}"
        times = (f"{run.full_ms:.0f}", f"{run.auto_ms:.0f}", f"{run.auto_ms / run.full_ms:.2f}")
        predicted = f"{report.predicted_ms:.0f}"
        table.add_row(escape(run.question), str(report.tokens), chosen, *times, predicted, f"{run.first_kl:.4f}", kl)
    whole = Table("figure", "measured", title="all questions")
    for name, value in found.items():
        whole.add_row(name, str(value))
    console = Console(width=120)
    for shown in (table, whole, ttft_targets.table(judged)):
        console.print(shown)
    result = {
        "benchmark": "auto",
        "model": args.model,
        "dtype": args.dtype,
        "data": Path(args.data).name,
        "stored": args.stored,
        "max_kl": args.max_kl,
        **found,
        "machine": machine(),
        "environment": ran_on,
        "targets": ttft_targets.as_json(judged),
    }
    print(json.dumps(result))
    missed = {verdict.target for verdict in judged if not verdict.met}
    return 0 if args.no_gate or not missed else MISSED + sum(BITS[target] for target in missed)


if __name__ == "__main__":
    sys.exit(main())

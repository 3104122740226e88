"""Ways to store chunks and to choose among their tokens, each held against full prefill: see docs/experiments.md.

    python benchmarks/recipes.py --data xquad.en.dev.json --questions 8
    python benchmarks/recipes.py --data xquad.en.dev.json --set stored --charged 0.05

A **recipe** is how the prompt's chunks were stored, what chooses the tokens that are computed again, and what is done
beside that. All recipes of a question share its full prefill, its stored chunks and, for the same stored chunks, the
question's attention, so that dozens of them cost little more than one.

``--set scores``: what a token's score is. ``heads``: how many of each chunk's first tokens go first. ``stored``: what
chunks are encoded behind. ``after``: what else is done to the canvas, or by whom tokens are chosen.

Every recipe is charged at most ``--charged`` of the cached token-layers, what choosing computes included; so is
``deviation`` over plain chunks, which ``of_deviation`` compares with. ``removed`` is the share of plain reuse's loss
that is gone. Losses are KL(full ‖ recipe) in nats: ``first`` of the first token, ``answer`` the mean along full
prefill's greedy answer of ``--max-new-tokens``; ``top1`` is the share of its tokens that both rank first.

Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import recipe_book as book
from recipe_book import Bench, Loss
from rich.console import Console
from rich.table import Table
from workload import engine, warm_up

from blend import versions
from blend.eval import datasets
from blend.eval.neighbours import behind, nearest
from blend.eval.prompts import prepare
from blend.eval.stats import bootstrap
from blend.rag.embedding import Embedder

SETS: dict[str, Callable[[Bench], Iterator[tuple[str, Loss]]]] = {
    "scores": book.scores,
    "heads": book.heads,
    "stored": book.stored,
    "after": book.after,
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="file or name of a data set with passages")
    parser.add_argument("--questions", type=int, default=8, help="spread over the data (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=8, help="of each, where the data leaves it (%(default)s)")
    parser.add_argument("--set", choices=SETS, help="measure one set of recipes alone")
    parser.add_argument("--charged", type=float, default=0.15, help="cap on the charged share (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="of answers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="of the choice of passages (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own)")
    args = parser.parse_args()
    for name in ("questions", "passages", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is 1 or more")
    if not 0 < args.charged <= 1:
        parser.error(f"--charged {args.charged:g} is not above 0 and at most 1")
    return args


def measure(args: argparse.Namespace) -> tuple[dict[str, dict[str, Loss]], dict[str, object]]:
    """The losses by recipe and question, and what they were measured on."""
    found: dict[str, dict[str, Loss]] = defaultdict(dict)
    dataset = datasets.load(args.data, passages=args.passages, limit=args.questions, seed=args.seed)
    with tempfile.TemporaryDirectory() as store, engine(args.model, args.dtype, args.threads, Path(store)) as blend:
        passages = [passage for example in dataset.examples for passage in example.passages]
        near = behind(blend, nearest(passages, Embedder(), book.MOST_NEIGHBOURS))
        warm_up(blend)
        asked = prepare(blend, dataset.examples, max_new_tokens=args.max_new_tokens).asked
        encoder = book.Encoder(blend, near)
        for number, one in enumerate(asked):
            sys.stderr.write(f"question {number + 1} of {len(asked)}\n")
            bench = Bench(encoder, one.prompt, args.charged, args.max_new_tokens)
            for name in ("baselines", *([args.set] if args.set else SETS)):
                for recipe, loss in book.baselines(bench) if name == "baselines" else SETS[name](bench):
                    found[recipe][one.example.id] = loss
        return found, versions.as_json(blend.stats())


def main() -> int:
    """Measure, print."""
    args = arguments()
    found, environment = measure(args)
    title = f"{args.model} {args.dtype}, charged at most {args.charged:g}"
    table = Table("recipe", "answer", "first", "top1", "of deviation", "removed", "charged", title=title)
    result: dict[str, dict[str, float]] = {}
    means = {name: sum(loss.answer for loss in losses.values()) / len(losses) for name, losses in found.items()}
    for name, losses in found.items():
        several = list(losses.values())
        interval = bootstrap([loss.answer for loss in several], list(losses))
        row = {
            "answer": means[name],
            "first": sum(loss.first for loss in several) / len(several),
            "top1": sum(loss.top1 for loss in several) / len(several),
            "of_deviation": _share(means[name], means[book.DEVIATION]),
            "removed": 1.0 - _share(means[name], means[book.REUSE]),
            "charged": sum(loss.charged for loss in several) / len(several),
        }
        result[name] = {key: round(value, 5) for key, value in row.items()}
        shown = (f"{row[key]:.3f}" for key in ("top1", "of_deviation", "removed", "charged"))
        table.add_row(name, str(interval), f"{row['first']:.4f}", *shown)
    Console(width=max(100, Console().width)).print(table)
    questions = len(next(iter(found.values())))
    sys.stdout.write(
        json.dumps({"benchmark": "recipes", "questions": questions, "recipes": result, "environment": environment})
        + "\n"
    )
    return 0


def _share(value: float, of: float) -> float:
    return value / of if of else math.nan


if __name__ == "__main__":
    sys.exit(main())

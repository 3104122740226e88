"""Time of prefill against tokens and ratio, chunks in the host tier: what it grows with. ``ttft.py --sweep``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ttft_targets
from growth import Cell, Fit, fit, over_rows, over_tokens, unexplained
from rich.console import Console
from rich.table import Table
from ttft_plot import need_matplotlib, plot
from workload import check_served, chunks_of, engine, fresh_rows, machine, plan, sized_prompts, tiers_of, warm_up

from blend import Engine, Prompt, versions

UNITS = {
    "row": (1e3, "ms a fresh row"),
    "row_token": (1e9, "ns a fresh row and token"),
    "byte": (1e12, "ms a GB loaded"),
    "request": (1e3, "ms a request"),
}
"""How coefficients, which are in seconds, are shown."""


def measure(args: argparse.Namespace) -> tuple[list[Cell], dict[str, Any]]:
    """Every length at every ratio, ``args.repeats`` times, and what they ran on; a cell keeps its fastest run.

    A round runs the whole grid once, so that a slow spell of the machine does not fall on one cell alone.
    """
    best: dict[tuple[int, float], Cell] = {}
    with tempfile.TemporaryDirectory() as store, engine(args.model, args.dtype, args.threads, Path(store)) as blend:
        made = sized_prompts(blend, args.data, args.tokens)
        warm_up(blend)
        for prompt in made:
            blend.precompute(chunks_of(prompt))
        blend.store.wait_idle()
        for turn in range(args.repeats):
            for prompt in made:
                for ratio in args.ratios:
                    cell = _run(blend, prompt, args.method, ratio)
                    sys.stderr.write(f"  {turn + 1}/{args.repeats}  {len(prompt)} × {ratio:g}: {cell.seconds:.3f} s\n")
                    kept = best.get((cell.tokens, ratio))
                    if kept is None or cell.seconds < kept.seconds:
                        best[cell.tokens, ratio] = cell
        return list(best.values()), versions.as_json(blend.stats())


def _run(engine: Engine, prompt: Prompt, method: str, ratio: float) -> Cell:
    report = engine.prefill(prompt, plan(method, ratio)).report
    check_served(tiers_of(report), "host", method)
    nbytes = sum(chunk.nbytes for chunk in report.chunks)
    return Cell(report.tokens, ratio, fresh_rows(report), nbytes, report.timings.ttft / 1e3)


def show(cells: Sequence[Cell], fitted: Fit, console: Console, title: str) -> None:
    """Print the cells with what the fit says of them, its coefficients, and the exponents."""
    table = Table(title=title)
    for column in ("tokens", "ratio", "fresh rows", "loaded MB", "seconds", "fitted", "off by"):
        table.add_column(column, justify="right")
    for cell, predicted in zip(cells, fitted.predicted, strict=True):
        sizes = f"{cell.tokens:,}", f"{cell.ratio:g}", f"{cell.rows:,.0f}", f"{cell.nbytes / 1e6:,.0f}"
        off = f"{predicted / cell.seconds - 1:+.1%}"
        table.add_row(*sizes, f"{cell.seconds:.3f}", f"{predicted:.3f}", off)
    console.print(table)
    terms = Table(title="seconds = a · rows + b · rows · tokens + c · bytes + d, none of them negative")
    for column in ("", "coefficient", "", "most of a prefill"):
        terms.add_column(column, justify="left" if not column else "right")
    for letter, (name, (scale, unit)) in zip("abcd", UNITS.items(), strict=True):
        coefficient = f"{fitted.coefficients[name] * scale:.4g}"
        terms.add_row(letter, coefficient, unit, f"{fitted.shares[name]:.0%}")
    console.print(terms)
    console.print(f"R² {fitted.r2:.5f}, largest residual {fitted.worst:.1%} of a cell's time")
    console.print(f"with a term in tokens² as well, that takes {unexplained(cells):.1%} of a prefill at most")
    tokens, rows = over_tokens(cells), over_rows(cells)
    console.print("time ~ tokens^e at ratio: " + ", ".join(f"{r:g}: {e:.2f}" for r, e in tokens.items()))
    console.print("time ~ fresh rows^e at tokens: " + ", ".join(f"{n:,}: {e:.2f}" for n, e in rows.items()))


def sweep(args: argparse.Namespace) -> tuple[dict[str, Any], list[ttft_targets.Verdict]]:
    """Measure, print and draw; returns the figures and the verdicts on them."""
    need_matplotlib()  # before minutes of measuring
    console = Console(width=110)
    cells, ran_on = measure(args)
    fitted = fit(cells)
    here = machine()
    show(cells, fitted, console, f"prefill, {args.model} {args.dtype}, {args.method}, chunks in the host tier")
    subtitle = f"method {args.method}, {args.model} {args.dtype}, on {here['cpu']}, threads: {here['threads']}"
    plot(cells, fitted, args.plot, subtitle)
    console.print(f"drawn: {args.plot}")
    result = {
        "benchmark": "ttft-sweep",
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "repeats": args.repeats,
        "cells": [asdict(cell) for cell in cells],
        "coefficients_s": fitted.coefficients,
        "most_of_a_prefill": {name: round(share, 4) for name, share in fitted.shares.items()},
        "r2": round(fitted.r2, 5),
        "worst_residual": round(fitted.worst, 4),
        "square_share": round(unexplained(cells), 4),
        "exponents": {
            "tokens": {f"{r:g}": round(e, 3) for r, e in over_tokens(cells).items()},
            "rows": {str(n): round(e, 3) for n, e in over_rows(cells).items()},
        },
        "machine": here,
        "environment": ran_on,
    }
    return result, ttft_targets.of_sweep(result)

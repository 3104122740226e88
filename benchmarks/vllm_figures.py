"""What ``vllm_ttft.py`` makes of its measurements: figures, tables, and whether the targets were reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bound import Rate
from rich.table import Table
from ttft_targets import MISSED, Verdict
from vllm_load import FEW, MOST
from vllm_phases import PARTS, Latencies, Pair, Throughput

RATIO, TOKENS = 0.15, 4000
"""What the targets are for, with ``query``."""

BITS = {"speed-up": 1, "latency": 2, "throughput": 4, "of bound": 8}
"""An exit status from :data:`ttft_targets.MISSED` on is that plus the sum of the bits of the missed targets."""

LEAST = {"speedup": 3.0, "throughput_ratio": 2.0, "of_bound": 0.6}
MOST_LATENCY = 2.0


def of_ttft(pairs: Sequence[Pair]) -> dict[str, float]:
    """Medians of one method's pairs."""
    return {
        "full_s": round(median(pair.full_s for pair in pairs), 4),
        "blend_s": round(median(pair.blend_s for pair in pairs), 4),
        "speedup": round(median(pair.full_s / pair.blend_s for pair in pairs), 3),
        "charged_ratio": round(median(pair.report["charged_ratio"] for pair in pairs), 4),
        **{part: round(median(pair.report[part] for pair in pairs), 1) for part in PARTS},
    }


def of_itl(latencies: Mapping[str, Latencies]) -> dict[str, Any]:
    """Percentiles of each kind, and the ratios of the 99th."""
    alone = latencies["alone"].percentile(99)
    figures: dict[str, Any] = {
        kind: {
            "p50_ms": round(of.percentile(50) * 1e3, 2),
            "p99_ms": round(of.percentile(99) * 1e3, 2),
            "most_ms": round(max(of.gaps) * 1e3, 2),
            "gaps": len(of.gaps),
            "ttft_s": round(median(of.ttfts), 4) if of.ttfts else None,
        }
        for kind, of in latencies.items()
    }
    figures["itl_p99_ratio"] = round(latencies["blend"].percentile(99) / alone, 3)
    figures["itl_full_p99_ratio"] = round(latencies["full"].percentile(99) / alone, 3)
    return figures


def of_throughput(runs: Sequence[Throughput], rate: Rate, step: float) -> dict[str, Any]:
    """What each mix took, and what the bound was made of."""
    return {
        "row_us": round(rate.row * 1e6, 3),
        "key_ns": round(rate.key * 1e9, 3),
        "decode_step_s": round(step, 5),
        **{
            f"{run.share:.0%}": {
                "full_s": round(run.full_s, 3),
                "blend_s": round(run.blend_s, 3),
                "ratio": round(run.ratio, 3),
                "bound_s": round(run.rows_s + run.decode_s, 3),
                "of_bound": round(run.of_bound, 3),
                "charged_ratio": round(run.charged_ratio, 4),
            }
            for run in runs
        },
    }


def summary(figures: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The figures that count, ``None`` where they were not measured."""
    first = figures.get("ttft", {}).get(method, {})
    itl, through = figures.get("itl", {}), figures.get("throughput", {})
    many, few = through.get(f"{MOST:.0%}", {}), through.get(f"{FEW:.0%}", {})
    return {
        **{name: first.get(name) for name in ("full_s", "blend_s", "speedup", "charged_ratio")},
        **{name: itl.get(name) for name in ("itl_p99_ratio", "itl_full_p99_ratio")},
        "throughput_ratio": many.get("ratio"),
        "throughput_ratio_90": few.get("ratio"),
        "of_bound": few.get("of_bound"),
    }


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """The targets that apply: those of what was measured, for ``query`` at that ratio and about that length."""
    if result["method"] != "query" or result["ratio"] != RATIO or abs(result["tokens"] / TOKENS - 1) > 0.15:
        return []
    found = []
    for target, name in (("speed-up", "speedup"), ("throughput", "throughput_ratio"), ("of bound", "of_bound")):
        if (value := result[name]) is not None:
            found.append(Verdict(target, f"{value:.2f}", f"{name} ≥ {LEAST[name]:g}", value >= LEAST[name]))
    if (value := result["itl_p99_ratio"]) is not None:
        found.append(Verdict("latency", f"{value:.2f}", f"itl_p99_ratio ≤ {MOST_LATENCY:g}", value <= MOST_LATENCY))
    return found


def status(found: Sequence[Verdict]) -> int:
    """The exit status: 0, or :data:`MISSED` plus the bits of the targets that were missed."""
    missed = {verdict.target for verdict in found if not verdict.met}
    return MISSED + sum(BITS[target] for target in missed) if missed else 0


# ------------------------------------------------------------------ tables


def ttft_table(title: str, methods: Mapping[str, Mapping[str, float]]) -> Table:
    """One line a method, from the figures of each."""
    parts = (part.replace("_", " ") for part in PARTS)
    made = _table(title, "method", "full s", "blend s", "speed-up", "charged", *parts)
    for method, found in methods.items():
        made.add_row(method, *(f"{value:g}" for value in found.values()))
    return made


def itl_table(title: str, latencies: Mapping[str, Latencies]) -> Table:
    """One line for each of what the decoding requests had beside them."""
    made = _table(title, "beside them", "p50 ms", "p99 ms", "most ms", "p99 ×", "TTFT s")
    alone = latencies["alone"].percentile(99)
    names = {"alone": "nothing", "blend": "blended requests", "full": "full prefills"}
    for kind, of in latencies.items():
        seconds = (of.percentile(50), of.percentile(99), max(of.gaps))
        ttft = f"{median(of.ttfts):.3f}" if of.ttfts else ""
        made.add_row(names[kind], *(f"{s * 1e3:.1f}" for s in seconds), f"{of.percentile(99) / alone:.2f}", ttft)
    return made


def throughput_table(title: str, runs: Sequence[Throughput]) -> Table:
    """One line a mix."""
    made = _table(title, "stored", "full s", "blend s", "×", "rows each", "charged", "bound s", "of bound")
    for run in runs:
        seconds = (f"{run.full_s:.2f}", f"{run.blend_s:.2f}", f"{run.ratio:.2f}")
        bound = (f"{run.charged_ratio:.3f}", f"{run.rows_s + run.decode_s:.2f}", f"{run.of_bound:.2f}")
        made.add_row(f"{run.share:.0%}", *seconds, f"{run.rows:.0f}", *bound)
    return made


def _table(title: str, *columns: str) -> Table:
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made

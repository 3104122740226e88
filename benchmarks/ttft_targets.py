"""What the times to first token have to reach, and the exit status that says which of it they did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

MISSED = 64
"""An exit status from here on is this plus the sum of the bits of the missed targets."""

BITS = {"speed-up": 1, "of bound": 2, "own full": 4, "selecting": 8, "from disk": 16, "growth": 32}

RATIO = 0.15
SPEED_UP = {1700: 3.0, 5700: 4.2}
"""Against stock full prefill, by tokens, at that ratio."""

OF_BOUND = 0.7
OWN_FULL = 1.05
SELECTING, SELECTING_TOKENS = 0.15, 5700
R2, SQUARE_SHARE, TOKENS_EXPONENT, ROWS_EXPONENT = 0.98, 0.05, 2.1, 1.1


@dataclass(frozen=True)
class Verdict:
    """A target: which one (a key of ``BITS``), what was measured, what it should be, and whether it is."""

    target: str
    measured: str
    wanted: str
    met: bool


def _about(tokens: float, wanted: int) -> bool:
    return abs(tokens / wanted - 1.0) <= 0.15


def of_comparison(result: Mapping[str, Any]) -> list[Verdict]:
    """The targets that apply to the comparison's ``result``: by its prompts' length, its method and its ratio."""
    found, tokens = [], result["tokens"]
    selects = result["method"] in ("query", "head", "random", "deviation") and result["requested_ratio"] == RATIO
    for length, least in SPEED_UP.items():
        if selects and _about(tokens, length):
            speedup = result["speedup_host"]
            wanted = f"≥ {least:g} × at {length:,} tokens"
            found.append(Verdict("speed-up", f"{speedup:.2f} × at {tokens:,.0f}", wanted, speedup >= least))
    if selects:
        share = result["of_bound"]
        found.append(Verdict("of bound", f"{share:.2f}", f"≥ {OF_BOUND:g} of the bound", share >= OF_BOUND))
    if result["own_full"] is not None:
        own = result["own_full"]
        wanted = f"≤ {OWN_FULL:g} × stock full prefill"
        found.append(Verdict("own full", f"{own:.3f} ×", wanted, own <= OWN_FULL))
    if result["method"] == "query" and selects and _about(tokens, SELECTING_TOKENS):
        share = result["select_share"]
        wanted = f"≤ {SELECTING:.0%} of TTFT at {SELECTING_TOKENS:,} tokens"
        found.append(Verdict("selecting", f"{share:.1%}", wanted, share <= SELECTING))
    if result["method"] not in ("full", "prefix"):
        share = result["of_disk_bound"]
        found.append(Verdict("from disk", f"{share:.3f}", "≤ 1 of disk_bound_s", share <= 1.0))
    return found


def of_sweep(result: Mapping[str, Any]) -> list[Verdict]:
    """The targets of a sweep: the cost grows with fresh rows × tokens, fresh rows and loaded bytes, nothing else."""
    tokens = max(result["exponents"]["tokens"].values())
    rows = max(result["exponents"]["rows"].values())
    r2, square = result["r2"], result["square_share"]
    return [
        Verdict("growth", f"R² {r2:.4f}", f"≥ {R2:g}, from rows, rows × tokens and bytes", r2 >= R2),
        Verdict("growth", f"{square:.1%}", f"≤ {SQUARE_SHARE:.0%} of the time with tokens²", square <= SQUARE_SHARE),
        Verdict("growth", f"tokens^{tokens:.2f}", f"≤ {TOKENS_EXPONENT:g} at every ratio", tokens <= TOKENS_EXPONENT),
        Verdict("growth", f"rows^{rows:.2f}", f"≤ {ROWS_EXPONENT:g} at every length", rows <= ROWS_EXPONENT),
    ]


def table(verdicts: Sequence[Verdict]) -> Table:
    """One line a target."""
    made = Table(title="targets")
    for column in ("target", "measured", "wanted", ""):
        made.add_column(column)
    for verdict in verdicts:
        made.add_row(verdict.target, verdict.measured, verdict.wanted, "met" if verdict.met else "MISSED")
    return made


def as_json(verdicts: Sequence[Verdict]) -> dict[str, bool]:
    """Whether each target that applies was met."""
    return {
        name: all(v.met for v in verdicts if v.target == name) for name in dict.fromkeys(v.target for v in verdicts)
    }


def status(verdicts: Sequence[Verdict]) -> int:
    """The exit status: 0, or :data:`MISSED` plus the bits of the targets that were missed."""
    missed = {v.target for v in verdicts if not v.met}
    return MISSED + sum(BITS[name] for name in missed) if missed else 0

"""What requests would take in a vLLM if every row cost what it costs there at full prefill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import growth

TERMS: tuple[growth.Term, ...] = (
    ("row", lambda cell: cell.rows),
    ("key", lambda cell: cell.rows * (cell.rows + 1) / 2),
)
"""What a full prefill's time is made of: its rows, and the keys that they attend to."""


@dataclass(frozen=True)
class Load:
    """So many requests in all, so many at a time, and so many new tokens for each."""

    requests: int
    concurrency: int
    tokens: int


@dataclass(frozen=True)
class Rate:
    """Seconds of full prefill: for a row, and for each key that it attends to."""

    row: float
    key: float

    def seconds(self, positions: Iterable[float]) -> float:
        """Seconds of rows at these positions, each of which attends to itself and all before it."""
        rows = list(positions)
        return self.row * len(rows) + self.key * (sum(rows) + len(rows))


def rate_of(measured: Mapping[int, Sequence[float]]) -> Rate:
    """Full prefill's own rate, from the seconds that prompts of two or more lengths took."""
    cells = [growth.Cell(n, 1.0, n, 0, seconds) for n, all_seconds in measured.items() for seconds in all_seconds]
    return Rate(**growth.fit(cells, TERMS).coefficients)


def blended_seconds(report: Mapping[str, Any], tokens: int, rate: Rate) -> float:
    """Seconds of all rows that a blended request of ``tokens`` tokens needs: mandatory, selected, and its probe's.

    The probe of ``query`` is the question; another's runs over the prompt, and counts as so many rows in its middle.
    """
    end = report["computed"] + report["filled"]
    rows = rate.seconds([*report["recomputed_positions"], *range(end, tokens)])
    probed = report["charged_ratio"] * report["cached"] - report["selected"]
    at = tokens - 1 if report["method"] == "query" else (tokens - 1) / 2
    return rows + float(probed) * rate.seconds([at])


def decode_seconds(load: Load, step: float) -> float:
    """Seconds of decoding behind the first tokens, with as many requests in each step as run at a time."""
    return load.requests * (load.tokens - 1) / load.concurrency * step

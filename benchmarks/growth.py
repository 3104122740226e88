"""With what the time of a prefill grows: a fit of its cost, and exponents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Cell:
    """One measured prefill: its tokens, the ratio, the rows that it computed, the bytes that it loaded, seconds."""

    tokens: int
    ratio: float
    rows: float
    nbytes: int
    seconds: float


Term = tuple[str, Callable[[Cell], float]]

TERMS: tuple[Term, ...] = (
    ("row", lambda cell: cell.rows),
    ("row_token", lambda cell: cell.rows * cell.tokens),
    ("byte", lambda cell: float(cell.nbytes)),
    ("request", lambda cell: 1.0),
)
"""What the cost should be made of: linear layers, attention, loading, and what every request costs."""

SQUARE: Term = ("token_token", lambda cell: float(cell.tokens) ** 2)
"""What the cost should not have: work on every pair of tokens, computed afresh or not."""


@dataclass(frozen=True)
class Fit:
    """Seconds as a sum of terms, none of them negative.

    ``coefficients`` are seconds for each row, row × token, byte and request; ``predicted`` the seconds of each cell;
    ``shares`` the most that each term makes of a cell's predicted seconds; ``r2`` the share of the variance of the
    seconds that is explained; ``worst`` the largest residual as a share of the cell's measured seconds.
    """

    coefficients: dict[str, float]
    shares: dict[str, float]
    predicted: list[float]
    r2: float
    worst: float


def fit(cells: Sequence[Cell], terms: Sequence[Term] = TERMS) -> Fit:
    """Fit the terms by non-negative least squares of relative residuals, so that short prefills count as much as long.

    Raises:
        ValueError: fewer cells than terms.
    """
    if len(cells) < len(terms):
        raise ValueError(f"{len(cells)} cells; {len(terms)} terms need as many")
    seconds = np.array([cell.seconds for cell in cells])
    columns = np.array([[value(cell) for _, value in terms] for cell in cells])
    scale = columns.max(axis=0)
    scale[scale == 0.0] = 1.0  # nothing was loaded, say
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones(len(cells)))
    coefficients = solution / scale
    parts = columns * coefficients
    predicted = parts.sum(axis=1)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    left = float(((seconds - predicted) ** 2).sum())
    names = [name for name, _ in terms]
    return Fit(
        coefficients=dict(zip(names, coefficients.tolist(), strict=True)),
        shares=dict(zip(names, (parts / predicted[:, None]).max(axis=0).tolist(), strict=True)),
        predicted=predicted.tolist(),
        r2=1.0 - left / spread if spread > 1e-12 * float((seconds**2).sum()) else 1.0,  # else there is none to explain
        worst=float(np.abs(predicted / seconds - 1.0).max()),
    )


def unexplained(cells: Sequence[Cell]) -> float:
    """The largest share of a cell's seconds that :data:`SQUARE` takes when it may: 0 where the cost has no such part.

    Raises:
        ValueError: fewer than five cells.
    """
    return fit(cells, (*TERMS, SQUARE)).shares[SQUARE[0]]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The power of ``x`` that ``y`` grows with: the least-squares slope of the logarithms; NaN of one ``x``."""
    if len(set(x)) < 2:
        return float("nan")
    across, up = np.log(x), np.log(y)
    across -= across.mean()
    return float((across * up).sum() / (across**2).sum())


def over_tokens(cells: Sequence[Cell]) -> dict[float, float]:
    """For each ratio the exponent of seconds over tokens."""
    groups: defaultdict[float, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.ratio].append(cell)
    return {r: exponent([c.tokens for c in g], [c.seconds for c in g]) for r, g in sorted(groups.items())}


def over_rows(cells: Sequence[Cell]) -> dict[int, float]:
    """For each number of tokens the exponent of seconds over rows."""
    groups: defaultdict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.tokens].append(cell)
    return {n: exponent([c.rows for c in g], [c.seconds for c in g]) for n, g in sorted(groups.items())}

"""What passes cost: rows and the keys they read, priced, and corrected by what passes took lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

from blend.errors import InvalidConfig

RECENT = 15
"""Passes whose times say how fast the engine is now: half of them have to change before the median does."""


class Work(NamedTuple):
    """Rows of passes, and the keys that they read together: a row at position ``p`` reads ``p + 1``."""

    rows: float = 0.0
    keys: float = 0.0

    @classmethod
    def at(cls, positions: Iterable[int]) -> Work:
        """Return the work of rows at these positions."""
        rows = keys = 0
        for position in positions:
            rows += 1
            keys += position + 1
        return cls(rows, keys)

    @classmethod
    def full(cls, tokens: int) -> Work:
        """Return the work of a full prefill."""
        return cls(tokens, tokens * (tokens + 1) / 2)

    def plus(self, other: Work) -> Work:
        """Return both together."""
        return Work(self.rows + other.rows, self.keys + other.keys)

    def less(self, other: Work) -> Work:
        """Return what is left without the other, which is a part of it."""
        return Work(max(0.0, self.rows - other.rows), max(0.0, self.keys - other.keys))


@dataclass(frozen=True)
class PassCost:
    """The price of a pass: ``base + per_row × rows + per_key × keys read``, in milliseconds where it was measured.

    ``fewest`` and ``most`` are the rows of the passes that it was fitted to; outside of them it is a guess.

    Raises:
        InvalidConfig: a number that is none, or below 0.
    """

    base: float
    per_row: float
    per_key: float
    fewest: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf):
                raise InvalidConfig(f"passes: {name}", value, "a number of 0 or more")

    def of(self, work: Work) -> float:
        """Return the price of a pass that does this work."""
        return self.base + self.per_row * work.rows + self.per_key * work.keys


class Running:
    """The median of the last :data:`RECENT` ratios of measured to predicted, so that no odd one among them counts.

    One thread adds to it; any may read.

    Args:
        trusted: as how many ratios of 1 the prediction itself counts before anything was measured.

    Attributes:
        value: the median; 0 while nothing is known.
        least: the least of them, likewise.
    """

    def __init__(self, trusted: int) -> None:
        self._ratios = deque([1.0] * trusted, maxlen=RECENT)
        self.value = self.least = 1.0 if trusted else 0.0

    def saw(self, measured: float, predicted: float) -> None:
        """Take note of what took so long; what is no time above 0 is not counted."""
        if 0 < measured < math.inf and 0 < predicted < math.inf:
            self._ratios.append(measured / predicted)
            self.value, self.least = median(self._ratios), min(self._ratios)

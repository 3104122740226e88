"""Means with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval over ``count`` questions."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values: Sequence[float], *, samples: int = 2000, seed: int = 0) -> Estimate:
    """Return the mean of one value a question with its percentile-bootstrap 95% interval."""
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), (samples, len(data)))
    low, high = np.quantile(data[picks].mean(axis=1), (0.025, 0.975))
    return Estimate(float(data.mean()), float(low), float(high), len(data))

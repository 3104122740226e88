"""What a blended prefill may recompute, and what it is charged for.

The unit is the token-layer: one reusable token freshly computed in one layer. The charged ratio is all
token-layers that were computed, a selector's own probe passes in full, over layers × reusable tokens.
Mandatory rows (misses, plain text, the question) are no part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The budget of one request.

    Args:
        layers: layers of the model.
        cached: reusable tokens, that is tokens whose KV was loaded.
        ratio: share of them that is to be selected.
        max_charged: cap on the charged ratio, or ``None``.
    """

    layers: int
    cached: int
    ratio: float
    max_charged: float | None = None

    def rows(self, probe: int) -> int:
        """Return how many tokens may be selected when the probe costs ``probe`` token-layers (never negative)."""
        # A hair is taken off before rounding up, so that 0.15 × 100 = 15.000000000000002 gives 15 rows.
        wanted = math.ceil(self.ratio * self.cached - 1e-9)
        if self.max_charged is not None:
            left = self.max_charged * self.cached - probe / self.layers
            wanted = min(wanted, math.floor(left + 1e-9))
        return max(0, min(wanted, self.cached))

    def affords(self, probe: int) -> bool:
        """Return whether the probe alone stays under the cap."""
        return self.max_charged is None or probe <= self.max_charged * self.cached * self.layers

    def charged(self, probe: int, selected: int) -> float:
        """Return the charged ratio for ``probe`` token-layers and ``selected`` tokens in every layer."""
        if self.cached == 0:
            return 0.0
        return (probe + selected * self.layers) / (self.layers * self.cached)

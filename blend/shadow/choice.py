"""Which requests of a share are compared."""

from __future__ import annotations

import random


class EvenShare:
    """Chooses a share of what comes: one at random out of each 1/share in a row.

    So the share is exact, up to one request, however few have come; no burst goes without, and what recurs in step with
    the share is not met each time. Who is chosen does not depend on a request's id: clients choose these.

    Args:
        share: from 0 to 1.
        seed: of the random places.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)
        self._seen = 0
        self._chosen = 0
        self._place = self._random.random()

    def next(self) -> bool:
        """Return whether the next one is chosen."""
        self._seen += 1
        if self._seen * self._share <= self._place:
            return False
        self._chosen += 1
        self._place = self._chosen + self._random.random()
        return True

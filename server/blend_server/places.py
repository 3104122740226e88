"""How many calls may be under way at once, and how many of them may be one tenant's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blend.errors import ResourceExhausted

RETRY_SECONDS = 1.0


class Places:
    """A bounded number of places for several tenants. Belongs to the event loop's thread.

    A tenant gets a place only while it holds fewer than are free: a tenant alone gets half of them, each of ``n`` that
    flood a share of ``1 / (n + 1)``, and as much stays free for whoever comes next (dynamic thresholds; Choudhury and
    Hahne, 1998).

    Args:
        total: the places.
        what: says in messages that there is none.
        shared: whether there is ever more than one tenant; if not, that one gets all of them.
    """

    def __init__(self, total: int, what: str, shared: bool = True) -> None:
        self._total = total
        self._what = what
        self._shared = shared
        self._held: Counter[str] = Counter()

    def held_by(self, tenant: str) -> int:
        """How many places a tenant holds."""
        return self._held[tenant]

    @contextmanager
    def hold(self, tenant: str, quota: int | None = None) -> Iterator[None]:
        """Hold one place for a tenant, which may hold ``quota`` of them.

        Raises:
            ResourceExhausted: there is none for it.
        """
        mine, free = self._held[tenant], self._total - self._held.total()
        if quota is not None and mine >= quota:
            raise ResourceExhausted(
                f"quota requests: tenant {tenant!r} has {mine} calls under way, the most that it may", RETRY_SECONDS
            )
        if not self._shared and free == 0:
            raise ResourceExhausted(f"{self._what}: all {self._total} places are taken; try again later", RETRY_SECONDS)
        if self._shared and mine >= free:
            raise ResourceExhausted(
                f"{self._what}: tenant {tenant!r} holds {mine} places and {free} are free; try again later",
                RETRY_SECONDS,
            )
        self._held[tenant] += 1
        try:
            yield
        finally:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]

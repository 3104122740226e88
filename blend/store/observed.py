"""A ledger that tells an observer what its tier comes to hold and what leaves it."""

from __future__ import annotations

from typing import TypeVar

from blend.store.ledger import Held, Ledger
from blend.store.residency import ResidencyObserver
from blend.store.tenants import NO_QUOTAS, Quotas
from blend.store.terms import DEFAULT_TERMS, Terms

H = TypeVar("H", bound=Held)


class ObservedLedger(Ledger[H]):
    """As any ledger. Its tier's lock is held while the observer is told, so that it hears of a key in order.

    What is cleared is told to nobody: a tier that closes says itself whether its objects go with it.

    Args:
        tier, capacity, terms, quotas: as for any ledger.
        observer: told of every object that comes in or is taken out, for whatever reason.
    """

    def __init__(
        self,
        tier: str,
        capacity: int,
        terms: Terms = DEFAULT_TERMS,
        observer: ResidencyObserver | None = None,
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        super().__init__(tier, capacity, terms, quotas)
        self._observer = observer

    def _insert(self, held: H) -> None:
        super()._insert(held)
        if self._observer is not None:
            self._observer.on_stored(held.key, self.tier, held.nbytes)

    def _take(self, held: H) -> None:
        super()._take(held)
        if self._observer is not None:
            self._observer.on_removed(held.key, self.tier)

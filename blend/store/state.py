"""What a store tells of a tier: its figures, or why it is down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from blend.errors import StoreError
from blend.store.base import Tier, TierStats


@dataclass(frozen=True)
class TierState(TierStats):
    """A tier's figures, and in ``down`` why it cannot be used now; empty where it can.

    A tier that is down may have figures all the same. Where it cannot tell them, they are 0.
    """

    down: str = ""


def state_of(tier: Tier, on_fault: Callable[[str, StoreError], None]) -> TierState:
    """Return a tier's state. ``on_fault`` is told the name and the fault of one that cannot say."""
    try:
        stats = tier.stats()
    except StoreError as error:
        on_fault(tier.name, error)
        return TierState(tier.name, 0, 0, 0, 0, 0, 0, 0, down=str(error))
    return stats if isinstance(stats, TierState) else TierState(**asdict(stats))

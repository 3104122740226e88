"""Which variant of a chunk is read. Tiers are asked no more than can change the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from blend.errors import StoreError
from blend.store.base import Tier
from blend.store.key import PLAIN
from blend.types import Variant


@runtime_checkable
class Recalls(Protocol):
    """A tier over a store that can be asked for a key, but not for the variants of a content key.

    Its ``variants`` may cost a round trip, or a lease. By that it finds no more than the plain variant: the
    conditioned ones are those that it recalls.
    """

    def recall(self, content: str) -> tuple[str, ...]:
        """Return the variants of a content key that this process has seen there, sorted, without asking."""


def recall(tier: Tier, content: str) -> tuple[str, ...]:
    """Return the variants that a tier can tell without a round trip, sorted.

    Raises:
        StoreError: the tier failed.
    """
    return tier.recall(content) if isinstance(tier, Recalls) else tier.variants(content)


def resolve(
    tiers: Sequence[Tier], content: str, variant: Variant, on_fault: Callable[[str, StoreError], None]
) -> str | None:
    """Return the name of the variant to read, or ``None`` where there is none; otherwise as ``TieredStore.resolve``.

    Raises:
        StoreError: nothing was found, and a tier failed that may have it.
    """
    plain, fault = False, None
    for tier in tiers:
        try:
            enough = plain or variant == "conditioned"
            names = recall(tier, content) if enough else tier.variants(content)
        except StoreError as error:
            on_fault(tier.name, error)
            fault = error
            continue
        conditioned = next((name for name in names if name != PLAIN), None)
        if conditioned is not None and variant != "plain":
            return conditioned
        if PLAIN in names and variant == "plain":
            return PLAIN
        plain = plain or (PLAIN in names and variant == "best")
    if not plain and fault is not None:
        raise fault
    return PLAIN if plain else None

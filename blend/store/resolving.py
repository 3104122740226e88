"""Which variant of a chunk is read. Tiers are asked no more than can change the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blend.errors import StoreError
from blend.store.base import Tier
from blend.store.key import PLAIN, ObjectKey
from blend.types import Variant


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
            recalled = tier.recall(content)
            conditioned = next((name for name in recalled if name != PLAIN), None)
            if conditioned is not None and variant != "plain":
                return conditioned
            if not plain and variant != "conditioned":
                plain = PLAIN in recalled or tier.contains(ObjectKey(content, PLAIN))
        except StoreError as error:
            on_fault(tier.name, error)
            fault = error
            continue
        if plain and variant == "plain":
            break
    if not plain and fault is not None:
        raise fault
    return PLAIN if plain else None

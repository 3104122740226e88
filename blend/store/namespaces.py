"""Namespaces of a store: what each holds, and taking one out of every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blend.errors import StoreError
from blend.store.base import Tier
from blend.store.key import ObjectKey

Track = Callable[[Sequence[ObjectKey]], Iterable[ObjectKey]]
"""Yields what it is given; for progress bars."""
Remove = Callable[[ObjectKey], tuple[list[str], Mapping[str, StoreError]]]
"""Removes an object from every tier; returns the names of those that had it, and the faults of those that failed."""
# Once for what is there, once more for what was put meanwhile or could not be removed at first.
_ROUNDS = 2


@dataclass(frozen=True)
class Usage:
    """Objects, and their bytes with headers."""

    objects: int = 0
    nbytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.objects + other.objects, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class NamespaceUsage:
    """What one namespace has in each tier, by the tier's name. ``tag`` is that of tenant and model, 18 hex digits.

    What other processes have put into a Mooncake store counts 0 bytes: its master lists names alone.
    """

    tag: str
    tiers: Mapping[str, Usage]


@dataclass(frozen=True)
class Dropped:
    """What became of dropping a namespace.

    Attributes:
        tag: of the tenant or the namespace.
        objects: how many objects were removed, each counted once.
        tiers: how many copies were removed from each tier, and their bytes.
        lingering_bytes: of what was removed, bytes that leases go on reading; they are free when those end.
        left: what could not be removed, and why: by ``"<tier>: <key>"``, or by a tier that could not be listed.
    """

    tag: str
    objects: int
    tiers: Mapping[str, Usage]
    lingering_bytes: int = 0
    left: Mapping[str, str] = field(default_factory=dict)


def usage_by_namespace(
    tiers: Sequence[Tier], on_fault: Callable[[str, StoreError], None]
) -> tuple[NamespaceUsage, ...]:
    """Return what each namespace has in each tier, by tag in order. A tier that fails is told of and left out."""
    found: dict[str, dict[str, Usage]] = {}
    for tier in tiers:
        try:
            objects = tier.sizes()
        except StoreError as error:
            on_fault(tier.name, error)
            continue
        for key, nbytes in objects:
            usage = found.setdefault(key.namespace, {})
            usage[tier.name] = usage.get(tier.name, Usage()) + Usage(1, nbytes)
    return tuple(NamespaceUsage(tag, found[tag]) for tag in sorted(found))


def drop(tag: str, tiers: Sequence[Tier], remove: Remove, track: Track = iter) -> Dropped:
    """Remove every object of a tenant or namespace; return what went and what did not.

    What is put while this runs may be there afterwards.
    """
    gone: set[ObjectKey] = set()
    removed = {tier.name: Usage() for tier in tiers}
    left: dict[str, str] = {}
    for _ in range(_ROUNDS):
        found = _find(tag, tiers, left)
        for key in track(list(found)):
            had, faults = remove(key)
            for name in had:
                removed[name] += Usage(1, found[key].get(name, 0))
                left.pop(f"{name}: {key}", None)
            left.update({f"{name}: {key}": str(error) for name, error in faults.items()})
            if had:
                gone.add(key)
    lingering = sum(tier.lingering(tag) for tier in tiers)
    return Dropped(tag, len(gone), removed, lingering, left)


def _find(tag: str, tiers: Sequence[Tier], left: dict[str, str]) -> dict[ObjectKey, dict[str, int]]:
    """Return the objects of a tenant or namespace: for each the tiers that have it, and its bytes there."""
    found: dict[ObjectKey, dict[str, int]] = {}
    for tier in tiers:
        try:
            for key, nbytes in tier.sizes():
                if key.within(tag):
                    found.setdefault(key, {})[tier.name] = nbytes
            left.pop(tier.name, None)
        except StoreError as error:
            left[tier.name] = str(error)
    return found

"""What a tier holds, in which order it was used, and how the bytes of its budget are spent."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from blend.errors import InvalidConfig, ResourceExhausted, StoreError
from blend.store.key import PLAIN, ObjectKey


class Held(Protocol):
    """An object in a ledger."""

    @property
    def key(self) -> ObjectKey: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def pinned(self) -> bool:
        """Whether anything can still read it."""
        ...


H = TypeVar("H", bound=Held)


class Ledger(Generic[H]):
    """The objects of one tier, least recently used first, and its budget. Its tier's lock guards every call.

    Every byte is counted once: as an object, as reserved for a writer, as aside (kept, but no object), or as
    departing (removed while pinned). ``used`` is their sum and never exceeds ``capacity``, except that
    :meth:`adopt` counts what was there before.
    """

    def __init__(self, tier: str, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise InvalidConfig(f"{tier}.capacity_bytes", capacity, "an integer of at least 1 (bytes)")
        self.tier = tier
        self.capacity = capacity
        self.evictions = 0
        self._used = 0
        self._reserved = 0
        self._aside = 0
        self._objects: OrderedDict[ObjectKey, H] = OrderedDict()
        self._conditioned: dict[str, set[str]] = {}
        self._departing: list[H] = []

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._objects

    @property
    def used(self) -> int:
        """Bytes of the budget that are spent now."""
        if self._departing:
            gone = sum(held.nbytes for held in self._departing if not held.pinned)
            self._departing = [held for held in self._departing if held.pinned]
            self._used -= gone
        return self._used

    def find(self, key: ObjectKey) -> H | None:
        """Return an object without using it."""
        return self._objects.get(key)

    def use(self, key: ObjectKey) -> H | None:
        """Return an object and make it the most recently used."""
        held = self._objects.get(key)
        if held is not None:
            self._objects.move_to_end(key)
        return held

    def keys(self) -> list[ObjectKey]:
        """Return all keys, least recently used first."""
        return list(self._objects)

    def objects(self) -> list[H]:
        """Return all objects, least recently used first."""
        return list(self._objects.values())

    def variants(self, content: str) -> tuple[str, ...]:
        """Return the variants of a content key, sorted."""
        conditioned = sorted(self._conditioned.get(content, ()))
        return (*conditioned, PLAIN) if ObjectKey(content, PLAIN) in self._objects else tuple(conditioned)

    def reserve(self, nbytes: int) -> list[H]:
        """Set ``nbytes`` aside for a writer; return the objects that were evicted for it, already taken out.

        Raises:
            ResourceExhausted: there is no room, even without everything that is unpinned; nothing was evicted.
        """
        if nbytes > self.capacity:
            raise ResourceExhausted(
                f"{self.tier}: an object of {nbytes} bytes is larger than the whole tier ({self.capacity} bytes)"
            )
        victims = []
        short = self.used + nbytes - self.capacity
        for held in self._objects.values():
            if short <= 0:
                break
            if not held.pinned:
                victims.append(held)
                short -= held.nbytes
        if short > 0:
            raise ResourceExhausted(
                f"{self.tier}: no room for {nbytes} bytes: leases and writers hold too much of {self.capacity} bytes"
            )
        for held in victims:
            self._take(held)
            self._used -= held.nbytes
        self.evictions += len(victims)
        self._used += nbytes
        self._reserved += nbytes
        return victims

    def cancel(self, nbytes: int) -> None:
        """Give a reservation back."""
        self._reserved -= nbytes
        self._used -= nbytes

    def settle(self, held: H) -> None:
        """Turn a reservation of its size into an object, the most recently used."""
        self._reserved -= held.nbytes
        self._insert(held)

    def adopt(self, held: H) -> None:
        """Count an object that was there before, as the most recently used."""
        self._used += held.nbytes
        self._insert(held)

    def remove(self, held: H) -> None:
        """Take an object out. Its bytes count for as long as it is pinned."""
        self._take(held)
        self._departing.append(held)

    def put_aside(self, held: H) -> None:
        """Take an object out and go on counting its bytes, until one of the methods below."""
        self._take(held)
        self._aside += held.nbytes

    def depart(self, held: H) -> None:
        """Count what was put aside only for as long as it is pinned."""
        self._aside -= held.nbytes
        self._departing.append(held)

    def bring_back(self, held: H) -> None:
        """Make what was put aside an object again, the least recently used."""
        self._aside -= held.nbytes
        self._insert(held)
        self._objects.move_to_end(held.key, last=False)

    def count_aside(self, nbytes: int) -> None:
        """Count bytes that are kept and are no object."""
        self._aside += nbytes
        self._used += nbytes

    def drop_aside(self, nbytes: int) -> None:
        """Stop counting bytes that were aside."""
        self._aside -= nbytes
        self._used -= nbytes

    def undo_eviction(self, held: H) -> None:
        """Make an evicted object one again, the least recently used."""
        self.evictions -= 1
        self._used += held.nbytes
        self._insert(held)
        self._objects.move_to_end(held.key, last=False)

    def clear(self) -> None:
        """Forget every object; reservations and what is aside stay counted."""
        self._objects.clear()
        self._conditioned.clear()
        self._departing.clear()
        self._used = self._reserved + self._aside

    def check(self) -> None:
        """Raise :class:`StoreError` unless the counts agree with the objects."""
        used = self.used
        parts = {
            "objects": sum(held.nbytes for held in self._objects.values()),
            "reserved": self._reserved,
            "aside": self._aside,
            "departing": sum(held.nbytes for held in self._departing),
        }
        if used != sum(parts.values()) or min(parts.values()) < 0 or used > self.capacity:
            raise StoreError(f"{self.tier}: ledger says {used} of {self.capacity} bytes, its parts are {parts}")
        conditioned = {(content, variant) for content, found in self._conditioned.items() for variant in found}
        if conditioned != {(key.content, key.variant) for key in self._objects if key.conditioned}:
            raise StoreError(f"{self.tier}: the index of {len(conditioned)} conditioned variants is not its objects'")

    def _insert(self, held: H) -> None:
        self._objects[held.key] = held
        if held.key.conditioned:
            self._conditioned.setdefault(held.key.content, set()).add(held.key.variant)

    def _take(self, held: H) -> None:
        key = held.key
        del self._objects[key]
        if key.conditioned:
            variants = self._conditioned[key.content]
            variants.discard(key.variant)
            if not variants:
                del self._conditioned[key.content]

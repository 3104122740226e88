"""What a tier holds, in which order it was used, and how the bytes of its budget are spent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from blend.errors import InvalidConfig, ResourceExhausted, StoreError
from blend.store.key import PLAIN, ObjectKey
from blend.store.terms import DEFAULT_TERMS, Pins, Terms


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
    departing (removed while pinned). ``used`` is their sum.

    Since all leases of a tier run equally long and renewing one is a use, the least recently used object is also the
    one whose last lease ends first.

    Args:
        tier: its name, for messages.
        capacity: the budget in bytes.
        terms: watermarks and clock.

    Attributes:
        keep: whether eviction has to spare an object.
        on_gone: told of each object that had departed and is no longer pinned.

    Raises:
        InvalidConfig: the budget is no positive integer.
    """

    def __init__(self, tier: str, capacity: int, terms: Terms = DEFAULT_TERMS) -> None:
        if type(capacity) is not int or capacity < 1:
            raise InvalidConfig(f"{tier}.capacity_bytes", capacity, "an integer of at least 1 (bytes)")
        self.tier = tier
        self.capacity = capacity
        self.evictions = 0
        self.pins = Pins(terms.clock)
        self.keep: Callable[[ObjectKey], bool] | None = None
        self.on_gone: Callable[[H], None] | None = None
        self._high, self._low = int(capacity * terms.high_watermark), int(capacity * terms.low_watermark)
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
        """Bytes that are spent now."""
        self.reap()
        return self._used

    def reap(self) -> int:
        """Stop counting what has departed and is no longer pinned; return its bytes."""
        if not self._departing:
            return 0
        gone: list[H] = []
        left: list[H] = []
        for held in self._departing:
            (left if held.pinned else gone).append(held)
        self._departing = left
        nbytes = sum(held.nbytes for held in gone)
        self._used -= nbytes
        if self.on_gone is not None:
            for held in gone:
                self.on_gone(held)
        return nbytes

    @property
    def departing(self) -> list[H]:
        """What was removed while pinned and is still counted."""
        return self._departing

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

    def require_fits(self, nbytes: int) -> None:
        """Raise :class:`ResourceExhausted` if an object of ``nbytes`` is larger than the whole tier."""
        if nbytes > self.capacity:
            raise ResourceExhausted(
                f"{self.tier}: an object of {nbytes} bytes is larger than the whole tier ({self.capacity} bytes)"
            )

    def no_room(self, nbytes: int) -> ResourceExhausted:
        """Return the error of a tier whose every byte is held."""
        return ResourceExhausted(
            f"{self.tier}: no room for {nbytes} bytes: leases, pins and writers hold too much of "
            f"{self.capacity} bytes; release some, or give the tier a larger budget"
        )

    def wanted(self, used: int, nbytes: int) -> tuple[int, int]:
        """Return how many bytes must go before ``nbytes`` more are spent, and how many should.

        Nothing should until the high watermark is passed; then all above the low one.
        """
        needed = max(0, used + nbytes - self.capacity)
        should = used + nbytes - self._low if used + nbytes > self._high else 0
        return needed, max(needed, should)

    def evictable(self, held: H) -> bool:
        """Return whether nothing forbids an object's eviction."""
        return not (held.pinned or self.pins.hard(held.key) or (self.keep is not None and self.keep(held.key)))

    def evict(self, needed: int, should: int) -> list[H] | None:
        """Take out what is neither pinned nor kept, least recently used first, until ``should`` bytes are found.

        Objects that are softly pinned go last, and only for what is needed. Returns ``None``, and takes out nothing,
        if there are not ``needed`` bytes.
        """
        victims: list[H] = []
        spared: list[H] = []
        found = 0
        for held in self._objects.values():
            if found >= should:
                break
            if not self.evictable(held):
                continue
            if self.pins.soft(held.key):
                spared.append(held)
                continue
            victims.append(held)
            found += held.nbytes
        for held in spared:
            if found >= needed:
                break
            victims.append(held)
            found += held.nbytes
        if found < needed:
            return None
        for held in victims:
            self.forget(held)
        self.evictions += len(victims)
        return victims

    def reserve(self, nbytes: int) -> list[H]:
        """Count ``nbytes`` for a writer; return the objects that were evicted for it, already taken out.

        Raises:
            ResourceExhausted: there is no room, even without everything that may go; nothing was evicted.
        """
        self.require_fits(nbytes)
        victims = self.evict(*self.wanted(self.used, nbytes))
        if victims is None:
            raise self.no_room(nbytes)
        self.count_reserved(nbytes)
        return victims

    def count_reserved(self, nbytes: int) -> None:
        """Count ``nbytes`` for a writer, whatever is used."""
        self._used += nbytes
        self._reserved += nbytes

    def cancel(self, nbytes: int) -> None:
        """Give a reservation back."""
        self._reserved -= nbytes
        self._used -= nbytes

    def settle(self, held: H) -> None:
        """Turn a reservation of its size into an object, the most recently used."""
        self._reserved -= held.nbytes
        self._insert(held)

    def linger(self, held: H) -> None:
        """Turn a reservation of its size into bytes that count for as long as they are pinned."""
        self._reserved -= held.nbytes
        self._departing.append(held)

    def adopt(self, held: H) -> None:
        """Count an object that was there before, as the most recently used."""
        self._used += held.nbytes
        self._insert(held)

    def forget(self, held: H) -> None:
        """Take an object out, its bytes too."""
        self._take(held)
        self._used -= held.nbytes
        self.pins.unpin(held.key)

    def remove(self, held: H) -> None:
        """Take an object out. Its bytes count for as long as it is pinned."""
        self._take(held)
        self._departing.append(held)
        self.pins.unpin(held.key)

    def put_aside(self, held: H) -> None:
        """Take an object out and go on counting its bytes, until one of the methods below."""
        self._take(held)
        self._aside += held.nbytes

    def depart(self, held: H) -> None:
        """Count what was put aside only for as long as it is pinned."""
        self._aside -= held.nbytes
        self._departing.append(held)
        self.pins.unpin(held.key)

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
        self.adopt(held)
        self._objects.move_to_end(held.key, last=False)

    def clear(self) -> None:
        """Forget every object; reservations and what is aside stay counted."""
        self._objects.clear()
        self._conditioned.clear()
        self._departing.clear()
        self.pins.clear()
        self._used = self._reserved + self._aside

    def check(self) -> None:
        """Raise :class:`StoreError` unless the counts agree with the objects."""
        parts = {
            "objects": sum(held.nbytes for held in self._objects.values()),
            "reserved": self._reserved,
            "aside": self._aside,
            "departing": sum(held.nbytes for held in self._departing),
        }
        if self._used != sum(parts.values()) or min(parts.values()) < 0:
            raise StoreError(f"{self.tier}: ledger says {self._used} of {self.capacity} bytes, its parts are {parts}")
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

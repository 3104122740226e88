"""What a tier holds, in which order it was used, and how the bytes of its budget are spent."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Generic, Protocol, TypeVar

from blend.errors import StoreError
from blend.store.key import PLAIN, ObjectKey
from blend.store.limits import Limits
from blend.store.tenants import NO_QUOTAS, Quotas, TenantUsage, usage_of
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
    departing (removed while pinned). ``used`` is their sum. It is also counted by tenant: one that has a quota makes
    room within that by its own objects alone, before anyone's go for the tier's budget.

    Since all leases of a tier run equally long and renewing one is a use, the least recently used object is also the
    one whose last lease ends first.

    Args:
        tier: its name, for messages.
        capacity: the budget in bytes.
        terms: watermarks and clock.
        quotas: what each tenant may hold of the budget.

    Attributes:
        limits: budget, watermarks and quotas.
        keep: whether eviction has to spare an object.
        on_gone: told of each object that had departed and is no longer pinned.

    Raises:
        InvalidConfig: the budget is no positive integer.
    """

    def __init__(self, tier: str, capacity: int, terms: Terms = DEFAULT_TERMS, quotas: Quotas = NO_QUOTAS) -> None:
        self.tier = tier
        self.capacity = capacity
        self.limits = Limits(tier, capacity, terms, quotas)
        self.evictions = 0
        self.pins = Pins(terms.clock)
        self.keep: Callable[[ObjectKey], bool] | None = None
        self.on_gone: Callable[[H], None] | None = None
        self._used = 0
        self._reserved: Counter[str] = Counter()
        self._aside: Counter[str] = Counter()
        self._shares: Counter[str] = Counter()
        self._objects: OrderedDict[ObjectKey, H] = OrderedDict()
        # The same objects by tenant, in the same order, of those tenants that have a quota.
        self._own: dict[str, OrderedDict[ObjectKey, H]] = {}
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

    def shares(self) -> dict[str, int]:
        """Return the bytes that are spent now, by tenant tag."""
        self.reap()
        return dict(self._shares)

    def usage(self) -> tuple[TenantUsage, ...]:
        """Return what every tenant holds, and may hold."""
        return usage_of(self.shares(), self.limits.quotas)

    def lingering(self, tag: str) -> int:
        """Return the bytes of a tenant's or namespace's objects that were removed while pinned, and still are."""
        self.reap()
        return sum(held.nbytes for held in self._departing if held.key.within(tag))

    def reap(self) -> list[H]:
        """Stop counting what has departed and is no longer pinned; return it."""
        if not self._departing:
            return []
        gone: list[H] = []
        left: list[H] = []
        for held in self._departing:
            (left if held.pinned else gone).append(held)
        self._departing = left
        for held in gone:
            self._spend(held.key, -held.nbytes)
            if self.on_gone is not None:
                self.on_gone(held)
        return gone

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
            own = self._own.get(key.tenant)
            if own is not None:
                own.move_to_end(key)
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

    def evictable(self, held: H) -> bool:
        """Return whether nothing forbids an object's eviction."""
        return not (held.pinned or self.pins.hard(held.key) or (self.keep is not None and self.keep(held.key)))

    def evict(self, needed: int, should: int) -> list[H] | None:
        """Take out what is neither pinned nor kept, least recently used first, until ``should`` bytes are found.

        Objects that are softly pinned go last, and only for what is needed. Returns ``None``, and takes out nothing,
        if there are not ``needed`` bytes.
        """
        return self._take_out(self._pick(self._objects.values(), needed, should))

    def evict_own(self, tenant: str, needed: int) -> list[H] | None:
        """Take out objects of one tenant that has a quota; otherwise as :meth:`evict`."""
        return self._take_out(self._pick(self._own.get(tenant, {}).values(), needed, needed))

    def _pick(
        self, objects: Iterable[H], needed: int, should: int, without: Container[ObjectKey] = ()
    ) -> list[H] | None:
        victims: list[H] = []
        spared: list[H] = []
        found = 0
        for held in objects:
            if found >= should:
                break
            if held.key in without or not self.evictable(held):
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
        return victims if found >= needed else None

    def _take_out(self, victims: list[H] | None) -> list[H] | None:
        for held in victims or ():
            self.forget(held)
        self.evictions += len(victims or ())
        return victims

    def reserve(self, key: ObjectKey, nbytes: int) -> list[H]:
        """Count ``nbytes`` for a writer of ``key``; return the objects that were evicted for it, already taken out.

        Raises:
            ResourceExhausted: there is no room, even without everything that may go; nothing was evicted.
        """
        self.limits.require_fits(key, nbytes)
        self.reap()
        excess = self.limits.excess(key.tenant, self._shares[key.tenant], nbytes)
        own = self._pick(self._own.get(key.tenant, {}).values(), excess, excess)
        if own is None:
            raise self.limits.over_quota(key.namespace, nbytes)
        left = self._used - sum(held.nbytes for held in own)
        others = self._pick(self._objects.values(), *self.limits.wanted(left, nbytes), {held.key for held in own})
        if others is None:
            raise self.limits.no_room(nbytes)
        victims = own + others
        self._take_out(victims)
        self.count_reserved(key, nbytes)
        return victims

    def count_reserved(self, key: ObjectKey, nbytes: int) -> None:
        """Count ``nbytes`` for a writer of ``key``, whatever is used."""
        self._spend(key, nbytes)
        _count(self._reserved, key, nbytes)

    def cancel(self, key: ObjectKey, nbytes: int) -> None:
        """Give a reservation back."""
        _count(self._reserved, key, -nbytes)
        self._spend(key, -nbytes)

    def settle(self, held: H) -> None:
        """Turn a reservation of its size into an object, the most recently used."""
        _count(self._reserved, held.key, -held.nbytes)
        self._insert(held)

    def linger(self, held: H) -> None:
        """Turn a reservation of its size into bytes that count for as long as they are pinned."""
        _count(self._reserved, held.key, -held.nbytes)
        self._departing.append(held)

    def adopt(self, held: H) -> None:
        """Count an object that was there before, as the most recently used."""
        self._spend(held.key, held.nbytes)
        self._insert(held)

    def forget(self, held: H) -> None:
        """Take an object out, its bytes too."""
        self._take(held)
        self._spend(held.key, -held.nbytes)
        self.pins.unpin(held.key)

    def remove(self, held: H) -> None:
        """Take an object out. Its bytes count for as long as it is pinned."""
        self._take(held)
        self._departing.append(held)
        self.pins.unpin(held.key)

    def put_aside(self, held: H) -> None:
        """Take an object out and go on counting its bytes, until one of the methods below."""
        self._take(held)
        _count(self._aside, held.key, held.nbytes)

    def depart(self, held: H) -> None:
        """Count what was put aside only for as long as it is pinned."""
        _count(self._aside, held.key, -held.nbytes)
        self._departing.append(held)
        self.pins.unpin(held.key)

    def bring_back(self, held: H) -> None:
        """Make what was put aside an object again, the least recently used."""
        _count(self._aside, held.key, -held.nbytes)
        self._insert(held)
        self._make_oldest(held)

    def count_aside(self, held: H) -> None:
        """Count the bytes of something that is kept and is no object."""
        _count(self._aside, held.key, held.nbytes)
        self._spend(held.key, held.nbytes)

    def drop_aside(self, held: H) -> None:
        """Stop counting something that was aside."""
        _count(self._aside, held.key, -held.nbytes)
        self._spend(held.key, -held.nbytes)

    def undo_eviction(self, held: H) -> None:
        """Make an evicted object one again, the least recently used."""
        self.evictions -= 1
        self.adopt(held)
        self._make_oldest(held)

    def clear(self) -> None:
        """Forget every object; reservations and what is aside stay counted."""
        self._objects.clear()
        self._own.clear()
        self._conditioned.clear()
        self._departing.clear()
        self.pins.clear()
        self._shares = self._reserved + self._aside
        self._used = sum(self._shares.values())

    def check(self) -> None:
        """Raise :class:`StoreError` unless the counts agree with the objects."""
        parts = {
            "objects": by_tenant(self._objects.values()),
            "reserved": self._reserved,
            "aside": self._aside,
            "departing": by_tenant(self._departing),
        }
        sums = {name: sum(part.values()) for name, part in parts.items()}
        if self._used != sum(sums.values()) or min(min(part.values(), default=0) for part in parts.values()) < 0:
            raise StoreError(f"{self.tier}: ledger says {self._used} of {self.capacity} bytes, its parts are {sums}")
        if self._shares != sum(parts.values(), Counter()):
            raise StoreError(f"{self.tier}: {len(self._shares)} tenants are not said to hold what is theirs")
        own = [key for objects in self._own.values() for key in objects]
        if len(own) != len(set(own)) or set(own) != {k for k in self._objects if self._has_quota(k)}:
            raise StoreError(f"{self.tier}: the order of {len(own)} objects by tenant is not that of all")
        conditioned = {(content, variant) for content, found in self._conditioned.items() for variant in found}
        if conditioned != {(key.content, key.variant) for key in self._objects if key.conditioned}:
            raise StoreError(f"{self.tier}: the index of {len(conditioned)} conditioned variants is not its objects'")

    def _has_quota(self, key: ObjectKey) -> bool:
        return self.limits.quotas.limit(key.tenant) is not None

    def _spend(self, key: ObjectKey, nbytes: int) -> None:
        self._used += nbytes
        _count(self._shares, key, nbytes)

    def _insert(self, held: H) -> None:
        key = held.key
        self._objects[key] = held
        if self._has_quota(key):
            self._own.setdefault(key.tenant, OrderedDict())[key] = held
        if key.conditioned:
            self._conditioned.setdefault(key.content, set()).add(key.variant)

    def _make_oldest(self, held: H) -> None:
        self._objects.move_to_end(held.key, last=False)
        if self._has_quota(held.key):
            self._own[held.key.tenant].move_to_end(held.key, last=False)

    def _take(self, held: H) -> None:
        key = held.key
        del self._objects[key]
        if self._has_quota(key):
            own = self._own[key.tenant]
            del own[key]
            if not own:
                del self._own[key.tenant]
        if key.conditioned:
            variants = self._conditioned[key.content]
            variants.discard(key.variant)
            if not variants:
                del self._conditioned[key.content]


def _count(counts: Counter[str], key: ObjectKey, nbytes: int) -> None:
    """Count bytes for a tenant; who has none is not kept."""
    counts[key.tenant] += nbytes
    if not counts[key.tenant]:
        del counts[key.tenant]


def by_tenant(objects: Iterable[Held]) -> Counter[str]:
    """Return the bytes of objects, by tenant tag."""
    found: Counter[str] = Counter()
    for held in objects:
        _count(found, held.key, held.nbytes)
    return found

"""The ledger of one tier, with tenants, against a plain model through any sequence of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blend.errors import ResourceExhausted
from blend.store import Namespace, ObjectKey, Quotas, content_key, tenant_tag
from blend.store.ledger import Ledger

SECRET = b"a secret of this test suite"
CAPACITY = 60
TENANTS = {name: tenant_tag(SECRET, name) for name in ("small", "large", "free")}
LIMITS = {TENANTS["small"]: 12, TENANTS["large"]: 40}
KEYS = [
    ObjectKey(content_key(Namespace(name, "0f" * 16, SECRET), (number,)), "plain")
    for name in TENANTS
    for number in range(8)
]
keys = st.sampled_from(KEYS)


@dataclass(eq=False)
class Thing:
    key: ObjectKey
    nbytes: int
    pinned: bool = field(default=False)


class LedgerMachine(RuleBasedStateMachine):
    """``order`` is the objects, least recently used first; ``spent`` what else counts, by tenant."""

    @initialize()
    def open(self) -> None:
        self.ledger: Ledger[Thing] = Ledger("tier", CAPACITY, quotas=Quotas(None, LIMITS))
        self.order: list[Thing] = []
        self.reserved: list[Thing] = []
        self.departing: list[Thing] = []
        self.aside: list[Thing] = []

    def holds(self, tenant: str | None = None) -> int:
        parts = (*self.order, *self.reserved, *self.departing, *self.aside)
        return sum(thing.nbytes for thing in parts if tenant in (None, thing.key.tenant))

    def known(self, key: ObjectKey) -> bool:
        return any(thing.key == key for thing in (*self.order, *self.reserved))

    def reap(self) -> None:
        self.departing = [thing for thing in self.departing if thing.pinned]

    @rule(key=keys, nbytes=st.integers(1, 20))
    def reserve(self, key: ObjectKey, nbytes: int) -> None:
        if self.known(key):
            return
        self.reap()
        limit = LIMITS.get(key.tenant, CAPACITY)
        own = max(0, self.holds(key.tenant) + nbytes - limit) if key.tenant in LIMITS else 0
        mine = [thing for thing in self.order if thing.key.tenant == key.tenant and not thing.pinned]
        before, used = list(self.order), self.holds()
        try:
            victims = self.ledger.reserve(key, nbytes)
        except ResourceExhausted:
            free = sum(thing.nbytes for thing in self.order if not thing.pinned)
            too_much_of_all = self.holds() - free + nbytes > CAPACITY
            assert nbytes > limit or sum(thing.nbytes for thing in mine) < own or too_much_of_all
            assert self.ledger.objects() == before
            return
        self.order = [thing for thing in self.order if thing not in victims]
        self.reserved.append(Thing(key, nbytes))
        assert not any(thing.pinned for thing in victims)
        # What goes for the quota is the tenant's own, its oldest first; others' goes for the budget alone.
        found = 0
        for place, thing in enumerate(mine):
            if found >= own:
                break
            assert victims[place] is thing
            found += thing.nbytes
        if any(thing.key.tenant != key.tenant for thing in victims):
            assert used - found + nbytes > CAPACITY

    @precondition(lambda self: self.reserved)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["settle", "cancel", "linger"]), pinned=st.booleans())
    def end_writing(self, which: int, how: str, pinned: bool) -> None:
        thing = self.reserved.pop(which % len(self.reserved))
        thing.pinned = pinned
        if how == "settle":
            self.ledger.settle(thing)
            self.order.append(thing)
        elif how == "linger":
            self.ledger.linger(thing)
            self.departing.append(thing)
        else:
            self.ledger.cancel(thing.key, thing.nbytes)

    @rule(key=keys)
    def use(self, key: ObjectKey) -> None:
        thing = self.ledger.use(key)
        assert (thing is not None) == any(other.key == key for other in self.order)
        if thing is not None:
            self.order.remove(thing)
            self.order.append(thing)

    @precondition(lambda self: self.order)
    @rule(which=st.integers(0, 99))
    def pin(self, which: int) -> None:
        thing = self.order[which % len(self.order)]
        thing.pinned = not thing.pinned

    @precondition(lambda self: self.order)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["remove", "forget", "aside"]))
    def take_out(self, which: int, how: str) -> None:
        thing = self.order.pop(which % len(self.order))
        if how == "remove":
            self.ledger.remove(thing)
            self.departing.append(thing)
        elif how == "forget":
            self.ledger.forget(thing)
        else:
            self.ledger.put_aside(thing)
            self.aside.append(thing)

    @precondition(lambda self: self.aside)
    @rule(how=st.sampled_from(["back", "drop", "depart"]))
    def end_aside(self, how: str) -> None:
        thing = self.aside.pop()
        if how == "back" and not self.known(thing.key):
            self.ledger.bring_back(thing)
            self.order.insert(0, thing)
        elif how == "depart":
            self.ledger.depart(thing)
            self.departing.append(thing)
        else:
            self.ledger.drop_aside(thing)

    @precondition(lambda self: self.departing)
    @rule()
    def release(self) -> None:
        self.departing[0].pinned = False

    @invariant()
    def the_ledger_is_right(self) -> None:
        self.reap()
        assert self.ledger.used == self.holds() <= CAPACITY
        assert self.ledger.objects() == self.order
        shares = self.ledger.shares()
        for tenant in TENANTS.values():
            assert shares.get(tenant, 0) == self.holds(tenant) <= LIMITS.get(tenant, CAPACITY)
        for usage in self.ledger.usage():
            assert usage.quota_bytes == LIMITS.get(usage.tenant)
        self.ledger.check()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

"""Leases that end by themselves."""

from __future__ import annotations

import math
from abc import abstractmethod
from weakref import WeakSet

from blend.errors import LeaseReleased
from blend.store.base import Lease
from blend.store.layout import Header
from blend.store.terms import Term, Terms


class TimedLease(Lease):
    """A lease of a tier with terms: released by its holder, or over when its time is."""

    def __init__(self, header: Header, tier: str, terms: Terms) -> None:
        super().__init__(header, tier)
        self._terms = terms
        self._term = Term(terms)
        self._ended = self._expired = False

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._ended else self._term.left

    def renew(self) -> None:
        self._require_held()
        self._term.renew()
        self._used()

    def release(self) -> None:
        self._ended = True
        self._let_go()

    def lapse(self) -> bool:
        """End the lease if its time is over; return whether it has ended."""
        if not self._ended and self._term.over:
            self._expired = True
            self.release()
        return self._ended

    def _require_held(self) -> None:
        if self.lapse():
            raise self._released()

    def _released(self) -> LeaseReleased:
        if not self._expired:
            return super()._released()
        return LeaseReleased(
            f"{self.header.key}: the lease on it expired after {self._terms.lease_seconds} s; renew it in time"
        )

    @abstractmethod
    def _let_go(self) -> None:
        """Drop what keeps the object. Called more than once."""

    @abstractmethod
    def _used(self) -> None:
        """Make the object the most recently used of its tier."""


class Readers:
    """The leases on one object that can expire, for eviction to end those whose time is over."""

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        self._leases: WeakSet[TimedLease] | None = None

    def add(self, lease: TimedLease) -> None:
        """Note a lease, if it can expire."""
        if lease.seconds_left < math.inf:
            if self._leases is None:
                self._leases = WeakSet()
            self._leases.add(lease)

    def lapse(self) -> None:
        """End the leases whose time is over."""
        for lease in list(self._leases or ()):
            lease.lapse()

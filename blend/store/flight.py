"""Single flight: what many ask for at once is done once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from blend.errors import ResourceExhausted

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Ticket(Generic[V]):
    """One asker's place in the queue for a key. Whoever leads has to end it: :meth:`SingleFlight.land` or ``fail``."""

    __slots__ = ("done", "leads", "value")

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self.done = False
        self.value: V | None = None


class _Flight(Generic[V]):
    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[Ticket[V]] = []


class SingleFlight(Generic[K, V]):
    """For each key at most one leader at a time; who asks meanwhile waits for what it brings.

    If the leader fails, the one that has waited longest leads instead. :meth:`join`, :meth:`land` and :meth:`fail`
    never wait, so that an engine's thread can use them; :meth:`run` is all of them for a thread that may.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flights: dict[K, _Flight[V]] = {}
        self.joined = 0
        """How many have asked for what was under way already."""

    def __len__(self) -> int:
        """Keys that are under way."""
        with self._changed:
            return len(self._flights)

    def join(self, key: K) -> Ticket[V]:
        """Ask for ``key``; the ticket says whether the caller leads."""
        with self._changed:
            flight = self._flights.get(key)
            ticket: Ticket[V] = Ticket(leads=flight is None)
            if flight is None:
                self._flights[key] = _Flight()
            else:
                flight.waiters.append(ticket)
                self.joined += 1
            return ticket

    def land(self, key: K, value: V) -> None:
        """The leader has it: everybody who waits gets it, and the flight is over."""
        with self._changed:
            for ticket in self._flights.pop(key).waiters:
                ticket.value, ticket.done = value, True
            self._changed.notify_all()

    def fail(self, key: K) -> None:
        """The leader gives up: the one that has waited longest leads; without any, the flight is over."""
        with self._changed:
            flight = self._flights[key]
            if flight.waiters:
                flight.waiters.pop(0).leads = True
            else:
                del self._flights[key]
            self._changed.notify_all()

    def wait(self, key: K, ticket: Ticket[V], timeout: float | None = None) -> bool:
        """Wait until the ticket is ``done`` or ``leads``; return False, having left the queue, if ``timeout`` passes
        before (seconds)."""
        with self._changed:
            if self._changed.wait_for(lambda: ticket.done or ticket.leads, timeout):
                return True
            self._flights[key].waiters.remove(ticket)
            return False

    def run(self, key: K, work: Callable[[], V], timeout: float | None = None) -> V:
        """Return what ``work`` returns, here or in the thread that leads; an error is raised where it happened.

        Raises:
            ResourceExhausted: the others were not done within ``timeout`` seconds.
        """
        begun = time.monotonic()
        ticket = self.join(key)
        if not ticket.leads and not self.wait(key, ticket, timeout):
            raise ResourceExhausted(f"{key}: not there after {time.monotonic() - begun:.1f} s of waiting for another")
        if ticket.done:
            return ticket.value  # type: ignore[return-value]
        try:
            value = work()
        except BaseException:
            self.fail(key)
            raise
        self.land(key, value)
        return value

"""How long readers may hold an object, what protects it from eviction, and when eviction begins and ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from blend.errors import InvalidConfig, InvalidInput
from blend.store.key import ObjectKey

Clock = Callable[[], float]
"""Seconds that only ever grow; where they begin does not matter."""


@dataclass(frozen=True)
class Terms:
    """The terms of one tier.

    Args:
        lease_seconds: how long a lease is good without being renewed; ``None`` means until it is released.
        high_watermark: share of the budget, above 0 and up to 1, above which eviction begins.
        low_watermark: share of the budget, above 0 and up to the high one, at which it ends.
        clock: monotonic seconds, so that setting the system's clock ends and extends nothing.

    Raises:
        InvalidConfig: a value is out of range.
    """

    lease_seconds: float | None = None
    high_watermark: float = 1.0
    low_watermark: float = 1.0
    clock: Clock = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        if self.lease_seconds is not None and not _positive(self.lease_seconds):
            raise InvalidConfig("lease_seconds", self.lease_seconds, "a number above 0 (seconds), or none")
        if not _positive(self.high_watermark) or self.high_watermark > 1:
            raise InvalidConfig("high_watermark", self.high_watermark, "a share above 0 and up to 1")
        if not _positive(self.low_watermark) or self.low_watermark > self.high_watermark:
            raise InvalidConfig("low_watermark", self.low_watermark, f"above 0 and up to {self.high_watermark}")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


DEFAULT_TERMS = Terms()
"""Leases that do not expire, and eviction of no more than room is needed for."""


class Term:
    """The time that one lease has left.

    Args:
        terms: those of its tier.
    """

    __slots__ = ("_ends", "_terms")

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._ends = math.inf
        self.renew()

    @property
    def over(self) -> bool:
        """Whether the lease has expired."""
        return self._ends < math.inf and self._terms.clock() >= self._ends

    @property
    def left(self) -> float:
        """Seconds until it expires: ``inf`` where leases do not, 0 once it has."""
        return max(0.0, self._ends - self._terms.clock()) if self._ends < math.inf else math.inf

    def renew(self) -> None:
        """Begin the time anew."""
        if self._terms.lease_seconds is not None:
            self._ends = self._terms.clock() + self._terms.lease_seconds


class Pins:
    """Which objects of a ledger eviction spares."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[ObjectKey, float] = {}

    def pin(self, key: ObjectKey, seconds: float | None) -> None:
        """Pin ``key`` softly for ``seconds``, or hard with ``None``; the last call counts.

        Raises:
            InvalidInput: ``seconds`` is no positive number.
        """
        if seconds is not None and not _positive(seconds):
            raise InvalidInput("seconds", seconds, "a number above 0, or none for a hard pin")
        self._until[key] = math.inf if seconds is None else self._clock() + seconds

    def unpin(self, key: ObjectKey) -> bool:
        """Take a pin back; return whether there was one."""
        until = self._until.pop(key, None)
        return until is not None and (until == math.inf or until > self._clock())

    def hard(self, key: ObjectKey) -> bool:
        """Whether ``key`` is never evicted."""
        return self._until.get(key) == math.inf

    def soft(self, key: ObjectKey) -> bool:
        """Whether ``key`` is evicted only where nothing else will do; forgets a pin whose time is over."""
        until = self._until.get(key)
        if until is None or until == math.inf:
            return False
        if until > self._clock():
            return True
        del self._until[key]
        return False

    def clear(self) -> None:
        """Forget every pin."""
        self._until.clear()

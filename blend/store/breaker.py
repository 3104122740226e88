"""A circuit breaker: what has failed a few times in a row is left alone for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from blend.errors import TierUnavailable


class Breaker:
    """Refuses calls while the other side is known to be down, and lets one through now and then to find out.

    It opens after ``threshold`` failures with no success between them, and whenever a health check fails. Once
    ``cooldown`` seconds have passed and health does not say otherwise, one call is let through: its success closes
    the breaker, its failure opens it again.

    Args:
        name: whose breaker it is; errors begin with it.
        threshold: failures in a row that open it.
        cooldown: seconds that it stays open.
        clock: a clock that never goes backwards, in seconds.
    """

    def __init__(self, name: str, threshold: int, cooldown: float, clock: Callable[[], float] = monotonic) -> None:
        self.name = name
        self.opened = 0
        self._threshold = threshold
        self._cooldown = cooldown
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until: float | None = None
        self._trying_until: float | None = None
        self._sick = ""
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why it is open; an empty string when it is closed."""
        with self._lock:
            return self._sick or (self._reason if self._until is not None else "")

    def check(self) -> None:
        """Return when a call may be made.

        Raises:
            TierUnavailable: it may not; the message says why.
        """
        with self._lock:
            self._require(self._clock())
            if self._until is not None:
                # A trial that never reports back, since its caller died, must not keep everybody out for good.
                self._trying_until = self._clock() + self._cooldown

    def peek(self) -> None:
        """As :meth:`check`, where no call is about to be made: it takes nobody's turn to try."""
        with self._lock:
            self._require(self._clock())

    def _require(self, now: float) -> None:
        if self._sick:
            raise TierUnavailable(f"{self.name}: down: {self._sick}")
        if self._until is not None:
            trying = self._trying_until is not None and now < self._trying_until
            if now < self._until or trying:
                raise TierUnavailable(f"{self.name}: down: {self._reason}")

    def succeeded(self) -> None:
        """Take note that a call has been answered, whatever the answer."""
        with self._lock:
            self._failures = 0
            self._until = self._trying_until = None

    def failed(self, reason: str) -> None:
        """Take note that a call has failed."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._threshold or self._until is not None:
                if self._until is None:
                    self.opened += 1
                self._reason = reason
                self._until = self._clock() + self._cooldown
                self._trying_until = None

    def health(self, sick: str) -> None:
        """Take note of a health check: an empty string when all is well, else what is wrong."""
        with self._lock:
            if sick and not self._sick:
                self.opened += 1
            if self._sick and not sick:
                # Up again, as far as it says: a single failure tells otherwise.
                self._until = self._trying_until = None
                self._failures = self._threshold - 1
            self._sick = sick

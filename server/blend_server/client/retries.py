"""When a call that failed is tried again, and after how long."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from blend.errors import InvalidInput
from blend_server.client.failures import ServiceError, service_error

MAX_ATTEMPTS = 100
MAX_SECONDS = 365 * 86400.0
"""Most seconds that a call, or a wait, may be given."""


@dataclass(frozen=True)
class Retries:
    """How often, and after how long, a call is tried again.

    It is where the server could not be reached or is shutting down (``UNAVAILABLE``), and where it was too busy and
    said when to come back (``RESOURCE_EXHAUSTED`` with a hint). Every other error, a quota that is used up for
    example, would come again. The wait doubles from try to try and is drawn evenly from 0 to that, so that clients
    that failed together do not come back together; a hint is waited for in full, and the drawn wait comes on top.

    Args:
        attempts: most tries, the first one included, 1 to 100.
        base: most seconds before the second try, 0 or more.
        most: most seconds before any try, but for the server's hint, ``base`` or more.
        total: a try begins only within so many seconds of the first one; a call's own timeout holds besides.

    Raises:
        InvalidInput: a value is out of its range.
    """

    attempts: int = 4
    base: float = 0.25
    most: float = 5.0
    total: float = 30.0

    def __post_init__(self) -> None:
        attempts: object = self.attempts
        if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= MAX_ATTEMPTS:
            raise InvalidInput("attempts", attempts, f"an integer from 1 to {MAX_ATTEMPTS}")
        for name, least in (("base", 0.0), ("most", self.base), ("total", 0.0)):
            if not least <= (value := getattr(self, name)) <= MAX_SECONDS:
                raise InvalidInput(name, value, f"seconds, from {least:g} to {MAX_SECONDS:.0f}")

    @classmethod
    def none(cls) -> Retries:
        """Return the policy that tries once."""
        return cls(attempts=1)


class Attempts:
    """The tries of one call. It decides and waits for nothing, so that blocking and asynchronous clients share it.

    Args:
        retries: the policy.
        timeout: seconds for all tries together; ``None``: no bound.
        clock: returns the time in seconds.
    """

    def __init__(self, retries: Retries, timeout: float | None, clock: Callable[[], float]) -> None:
        self._retries = retries
        self._clock = clock
        self._failed = 0
        self._begun = clock()
        self._ends = math.inf if timeout is None else self._begun + timeout
        self._maybe_done = False  # a reply may have been lost, not the call

    def left(self) -> float | None:
        """Return the seconds that the next try has; ``None``: no bound."""
        return None if math.isinf(self._ends) else max(self._ends - self._clock(), 0.0)

    def progressed(self) -> None:
        """Begin to count anew: the call has got somewhere, so what fails from here on is another failure."""
        self._failed, self._begun = 0, self._clock()

    def done_before(self, error: grpc.RpcError) -> bool:
        """Return whether a removal finds nothing since a try before, whose reply was lost, may have removed it."""
        return self._maybe_done and error.code() is grpc.StatusCode.NOT_FOUND

    def pause(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            ServiceError: there is to be none; it says what ``error`` does.
        """
        told = service_error(error)
        wait = self._wait(told)
        if wait is None:
            raise told from error
        self._failed += 1
        self._maybe_done |= told.code == grpc.StatusCode.UNAVAILABLE.name
        return wait

    def _wait(self, error: ServiceError) -> float | None:
        if self._failed + 1 >= self._retries.attempts:
            return None
        busy = error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.name and error.retry_seconds is not None
        if not busy and error.code != grpc.StatusCode.UNAVAILABLE.name:
            return None
        most = min(self._retries.base * 2.0**self._failed, self._retries.most)
        wait = random.uniform(0.0, most) + max(error.retry_seconds or 0.0, 0.0)
        at = self._clock() + wait
        return wait if at <= self._begun + self._retries.total and at < self._ends else None


def check_timeout(seconds: float) -> float:
    """Return a call's timeout.

    Raises:
        InvalidInput: no time at all, or more than a year.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidInput("timeout", seconds, f"seconds, more than 0 and at most {MAX_SECONDS:.0f}")
    return seconds

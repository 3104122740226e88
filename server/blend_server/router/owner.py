"""What the router knows of one tenant, apart from the documents themselves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from blend_server.auth import Caller
from blend_server.router.link import Metadata

FIRST_SECONDS = 1.0
"""After how long an engine that could not catch up is tried again."""
MOST_SECONDS = 60.0
"""The same for one whose documents were compared in vain again and again."""


class Credentials(NamedTuple):
    """What proves to the engines who is calling, and who that was when they were let in.

    What they prove may change while they are kept: the gate has to be asked about ``who`` before each use.
    """

    who: Caller
    metadata: Metadata


class _Pause(NamedTuple):
    until: float
    seconds: float


class Owner:
    """One tenant.

    Attributes:
        lock: held while its documents change, or are compared.
        credentials: those of its last call, which are never written down; ``None``: nobody has called, or they are
            not valid any more.
        catching_up: by engine, what brings it up.
        failures: how often engines have failed at a change that none has taken, by its number.
    """

    def __init__(self, name: str, credentials: Credentials | None = None) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.credentials = credentials
        self.catching_up: dict[str, asyncio.Task[None]] = {}
        self.failures: Counter[int] = Counter()
        self._pauses: dict[str, _Pause] = {}
        self._era = 0

    def note_era(self, era: int, now: float) -> None:
        """Shorten all pauses where the engines' ``era`` is a new one."""
        if era != self._era:
            self._era = era
            self.shorten_pauses(now)

    def may_try(self, engine: str, now: float) -> bool:
        """Return whether an engine may be brought up now."""
        return engine not in self._pauses or now >= self._pauses[engine].until

    def pause(self, engine: str, now: float, *, longer: bool) -> None:
        """Note that an engine could not be brought up: ``longer`` makes its pause twice as long as the last one."""
        last = self._pauses.get(engine)
        seconds = min(2 * last.seconds, MOST_SECONDS) if last is not None and longer else FIRST_SECONDS
        self._pauses[engine] = _Pause(now + seconds, seconds)

    def shorten_pauses(self, now: float) -> None:
        """Have every engine tried soon: something has changed that may help it."""
        for engine, pause in self._pauses.items():
            self._pauses[engine] = _Pause(min(pause.until, now + FIRST_SECONDS), FIRST_SECONDS)

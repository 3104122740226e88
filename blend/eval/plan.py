"""What is to be measured: methods, each at its ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blend.errors import InvalidInput
from blend.eval import methods
from blend.names import unknown
from blend.types import PLAIN_METHODS

WITHOUT_RATIO = (*PLAIN_METHODS, "auto", "closed-book")
"""Methods that take no ratio."""


@dataclass(frozen=True)
class Planned:
    """A method, and its ratio: ``None`` for one that selects nothing."""

    method: str
    ratio: float | None = None

    def __str__(self) -> str:
        return self.method if self.ratio is None else f"{self.method} {self.ratio:g}"


FULL = Planned("full")
REUSE = Planned("reuse")


def conditioned(planned: Iterable[Planned]) -> bool:
    """Return whether any of them runs over conditioned chunks, or may: ``auto`` takes them where they are stored."""
    return any(methods.split(p.method)[1] != "plain" for p in planned)


def plan(names: Sequence[str], ratios: Sequence[float]) -> tuple[Planned, ...]:
    """Return every method at every ratio, in the order named; full prefill, which all is held against, comes first.

    Raises:
        InvalidInput: an unknown method (with the nearest), or a ratio outside 0 to 1.
    """
    for ratio in ratios:
        if not 0 <= ratio <= 1:
            raise InvalidInput("ratios", ratio, "numbers from 0 to 1")
    found = [FULL]
    for name in names:
        if name not in methods.names():
            raise unknown("methods", name, methods.names())
        found += (
            [Planned(name)] if methods.split(name)[0] in WITHOUT_RATIO else [Planned(name, ratio) for ratio in ratios]
        )
    return tuple(dict.fromkeys(found))

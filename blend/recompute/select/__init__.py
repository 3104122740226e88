"""Selectors by name."""

from __future__ import annotations

from blend.errors import InvalidPlan
from blend.recompute.select.base import Blend, Selection, Selector
from blend.recompute.select.deviation import Deviation
from blend.recompute.select.fixed import Head, Random
from blend.recompute.select.query import Query
from blend.types import PLAIN_METHODS

_SELECTORS: dict[str, Selector] = {s.name: s for s in (Random(), Head(), Deviation(), Query())}


def methods() -> tuple[str, ...]:
    """Return every method that a plan may name, ``auto`` first."""
    return ("auto", *PLAIN_METHODS, *_SELECTORS)


def selector(method: str) -> Selector | None:
    """Return the selector of a method, or ``None`` for one that selects nothing.

    Raises:
        InvalidPlan: there is no such method.
    """
    if method in PLAIN_METHODS:
        return None
    try:
        return _SELECTORS[method]
    except KeyError:
        raise InvalidPlan("method", method, ", ".join(methods())) from None


__all__ = ["Blend", "Selection", "Selector", "methods", "selector"]

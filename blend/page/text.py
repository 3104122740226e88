"""Numbers and foreign text as the page writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

MISSING = "–"
"""Stands for a number that there is none of."""

# Control characters, halves of surrogate pairs, and what turns the direction of the text that follows.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(text: str) -> str:
    """Return a text in which every character that a page cannot hold, or that would disturb it, is written as U+…"""
    return _UNSEEN.sub(lambda found: f"U+{ord(found[0]):04X}", text)


def cleaned(value: Any) -> Any:
    """Return a value with every text in it cleaned: in mappings, their keys too, in sequences, and in dataclasses."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(cleaned, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: cleaned(getattr(value, field.name)) for field in fields(value)})
    return value


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` decimals, with an exponent where it would else be 0 or of more than nine digits,
    and a dash for none or not finite."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value and not 0.5 * 10**-digits <= abs(value) < 1e9:
        return f"{value:.1e}"
    return f"{value + 0.0:.{digits}f}"  # -0 is 0

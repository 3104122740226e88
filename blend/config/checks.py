"""What several settings ask of their values."""

from __future__ import annotations

import math

from blend.errors import InvalidConfig


def at_least(name: str, value: object, low: int, unit: str) -> None:
    """Refuse what is no integer from ``low`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidConfig(name, value, f"an integer of at least {low} ({unit})")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse what is none of those names."""
    if value not in allowed:
        raise InvalidConfig(name, value, ", ".join(allowed))


def within(name: str, value: object, low: float, high: float) -> None:
    """Refuse what is no number from ``low`` to ``high``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:  # type: ignore[operator]
        raise InvalidConfig(name, value, f"a number from {low} to {high}")


def is_address(value: object) -> bool:
    """Whether a value is ``host:port`` with a port that can be connected to."""
    if not isinstance(value, str):
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and is_port(port) and int(port) > 0


def is_listening(value: object) -> bool:
    """Whether a value is ``host:port`` to listen at, where port 0 takes a free one."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon and host) and is_port(port)


def is_port(text: str) -> bool:
    """Whether a text is a port's number, 0 included."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536

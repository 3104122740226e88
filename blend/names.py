"""Names that people type: an unknown one is refused with the nearest that there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from blend.errors import InvalidInput


def unknown(what: str, name: object, allowed: Iterable[str], kind: type[InvalidInput] = InvalidInput) -> InvalidInput:
    """Return the error for a name that is none of ``allowed``; ``what`` says of what. To be raised by the caller."""
    names = list(allowed)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    listed = ", ".join(names)
    return kind(what, name, f"{near[0]} (the nearest), or one of: {listed}" if near else listed)

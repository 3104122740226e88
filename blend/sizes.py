"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from blend.errors import InvalidInput

MOST_BYTES = (1 << 63) - 1
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([KMGT]iB)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str, most: int = MOST_BYTES) -> int:
    """Return the bytes that ``text`` stands for: a plain number, or one with a unit, such as ``1.5GiB``.

    Raises:
        InvalidInput: it is no size, or more than ``most``.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = int(Decimal(match[1]) * _UNITS[(match[2] or "").upper()]) if match is not None else -1
    if not 0 <= nbytes <= most:
        raise InvalidInput("size", text, f"a size such as 1073741824, 512MiB or 1.5GiB, at most {most}")
    return nbytes


def show_size(nbytes: int) -> str:
    """Return a size in the largest unit that divides it, for :func:`parse_size` to read."""
    fitting = [(unit, scale) for unit, scale in _UNITS.items() if nbytes % scale == 0 and scale <= max(nbytes, 1)]
    unit, scale = max(fitting, key=lambda pair: pair[1])
    return f"{nbytes // scale}{unit.replace('IB', 'iB')}"

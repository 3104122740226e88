"""Values of settings, from texts and from files: what they stand for, and which are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from blend.decoding import decode
from blend.errors import InvalidInput
from blend.names import unknown
from blend.sizes import MOST_BYTES, parse_size
from blend_server.settings.places import PLACES, Place
from blend_server.settings.table import BY_PATH, MOST_COUNT, Flag

_MAX_TEXT = 1024
_METAVARS = {int: "N", float: "X", bool: None}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def from_text(flag: Flag, text: str | list[str], where: str) -> object:
    """Return what a flag or a variable says, as a file would have it.

    Args:
        text: a list is of a flag that may be repeated; a variable has spaces between them.
        where: the flag's or the variable's name, for errors.

    Raises:
        InvalidInput: it is no text of this kind.
    """
    place = PLACES[flag.path]
    if (item := listed(place)) is not None:
        return [_item(item, part) for part in (text.split() if isinstance(text, str) else text)]
    assert isinstance(text, str)
    if flag.words is not None:
        if text not in flag.words:
            raise unknown(where, text, flag.words)
        return flag.words[text]
    reader = next((read for kind, read in _READERS if kind in place.kinds and not place.size), None)
    if reader is not None:
        return reader(text, where)
    return _object(text, where) if mapped(place) else text


def checked(place: Place, value: object, where: str) -> Any:
    """Return a value of a file, or of :func:`from_text`, as its field wants it. A secret's is its file's path.

    Raises:
        InvalidInput: it is of another kind, or too large for what it is for.
    """
    flag = BY_PATH.get(place.path)
    if value is None and place.optional:
        return None
    if place.secret:
        return decode(str, value, where)
    given = _size(value, where) if place.size and isinstance(value, str) else value
    made = decode(place.kind, given, where)
    if type(made) is int:
        _check_number(place, flag, value, made, where)
    elif isinstance(made, str) and flag is not None and not flag.any_text and Path not in place.kinds:
        _check_text(made, where, flag.ascii)
    return made


def listed(place: Place) -> type | None:
    """The dataclass that a setting has many of."""
    (kind,) = place.kinds if len(place.kinds) == 1 else (None,)
    if get_origin(kind) is tuple and is_dataclass(item := get_args(kind)[0]) and isinstance(item, type):
        return item
    return None


def mapped(place: Place) -> bool:
    """Whether a setting is a mapping of names that are its user's own."""
    origin = get_origin(place.kinds[0])
    return isinstance(origin, type) and issubclass(origin, Mapping)


def chosen(place: Place) -> tuple[str, ...]:
    """The words that a setting is one of; none where it may be anything."""
    (kind,) = place.kinds if len(place.kinds) == 1 else (None,)
    return get_args(kind) if get_origin(kind) is Literal else ()


def stands_for(place: Place) -> str | None:
    """What stands for a setting's value in help; ``None`` where it is true or false."""
    if (flag := BY_PATH.get(place.path)) is not None and flag.metavar is not None:
        return flag.metavar
    if words := chosen(place) or tuple((flag and flag.words) or ()):
        return "{" + ",".join(words) + "}"
    if place.size:
        return "SIZE"
    if place.secret or Path in place.kinds:
        return "FILE"
    return "JSON" if mapped(place) else _METAVARS.get(place.kinds[0], place.name.upper())


def _item(kind: type, text: str) -> dict[str, str]:
    """The fields of one of many, with commas between them."""
    names = [f.name for f in fields(kind)]
    return dict(zip(names, text.split(",", len(names) - 1), strict=False))


def _truth(text: str, where: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise InvalidInput(where, text, ", ".join(_TRUTHS))
    return _TRUTHS[text.lower()]


def _count(text: str, where: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_TEXT and int(digits) <= MOST_COUNT):
        raise InvalidInput(where, text, f"a whole number from 0 to {MOST_COUNT}")
    return int(digits)


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(where, text, "a number, such as 0.5")
    return number


_READERS: tuple[tuple[type, Callable[[str, str], object]], ...] = ((bool, _truth), (int, _count), (float, _number))


def _object(text: str, where: str) -> object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(where, "…", f"a JSON object ({error})") from None
    if not isinstance(found, dict):
        raise InvalidInput(where, text, "a JSON object")
    return found


def _size(text: str, where: str) -> int:
    try:
        return parse_size(text, MOST_BYTES)
    except InvalidInput as error:
        raise InvalidInput(where, text, error.allowed) from None


def _check_number(place: Place, flag: Flag | None, value: object, made: int, where: str) -> None:
    if flag is not None and flag.most is not None:
        most = flag.most
    else:
        most = MOST_BYTES if flag is None or place.size else MOST_COUNT
    if made > most:
        what = "a size such as 1073741824, 512MiB or 1.5GiB, at most" if place.size else "a whole number from 0 to"
        raise InvalidInput(where, value, f"{what} {most}")


def _check_text(text: str, where: str, ascii_only: bool) -> None:
    if not text.isprintable() or len(text) > _MAX_TEXT or (ascii_only and not text.isascii()):
        what = "ASCII text" if ascii_only else "text"
        raise InvalidInput(where, text, f"printable {what} of at most {_MAX_TEXT} characters")

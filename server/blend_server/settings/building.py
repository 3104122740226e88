"""Settings from what the sources say together."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from blend.errors import InvalidConfig
from blend_server.settings.errors import noted
from blend_server.settings.places import PLACES, CommandConfig, Place, below, locate, within
from blend_server.settings.sources import REFUSED, Given
from blend_server.settings.table import BY_PATH
from blend_server.settings.values import stands_for

_MAX_SECRET = 4096


class Building:
    """Makes dataclasses of what is given, and finds all that is wrong with it.

    Args:
        given: what the sources say, by path.
        errors: what is wrong is added to it.
    """

    def __init__(self, given: Mapping[str, Given], errors: list[InvalidConfig]) -> None:
        self._given = given
        self._errors = errors

    def whole(self) -> CommandConfig | None:
        """Return all settings, or ``None`` where they could not be made, of which there is an error then."""
        made = self._section(CommandConfig, "")
        return made if isinstance(made, CommandConfig) else None

    def _section(self, kind: type, path: str) -> object | None:
        values: dict[str, Any] = {}
        complete = True
        for place in within(kind, path).values():
            if place.section is None:
                self._add(place, values)
            elif self._is_there(place):
                values[place.name] = self._section(place.section, place.path)
                complete = complete and values[place.name] is not None
            elif place.path in self._given:
                values[place.name] = None
        return self._made(kind, path, values) if complete and self._has_all(kind, path, values) else None

    def _add(self, place: Place, values: dict[str, Any]) -> None:
        given = self._given.get(place.path)
        if given is None or given.value is REFUSED:
            return
        value = given.value
        if place.secret and isinstance(value, str):
            value = None
            with noted(self._errors):
                value = secret(str(given.value), given.name)
        values[place.name] = value

    def _is_there(self, place: Place) -> bool:
        stated, inner = self._given.get(place.path), below(self._given, place.path)
        if stated is not None and stated.value is REFUSED:
            return False
        if stated is not None and stated.value is not None:
            return True
        flag = BY_PATH.get(place.path)
        if flag is None or flag.words is None:
            return bool(inner)
        if inner:
            words = {value is None: word for word, value in flag.words.items()}
            name = flag.option if stated is None else stated.name
            self._errors.append(InvalidConfig(name, words[True], f"{words[False]}, with {self._names(inner)}"))
        return False

    def _has_all(self, kind: type, path: str, values: Mapping[str, Any]) -> bool:
        lacking = [p for p in within(kind, path).values() if p.default is MISSING and p.name not in values]
        unsaid = [place for place in lacking if place.path not in self._given]
        if unsaid:
            names = ", ".join(named(place.path, self._given) for place in unsaid)
            kinds = ", ".join(dict.fromkeys(stands_for(place) or "a value" for place in unsaid))
            by = self._names(below(self._given, path) or [path])
            self._errors.append(InvalidConfig(names, None, f"{kinds}, with {by}"))
        return not lacking

    def _made(self, kind: type, path: str, values: dict[str, Any]) -> object | None:
        """Return a dataclass. What it refuses is left out in the next try, to find what else it does."""
        while True:
            try:
                made: object = kind(**values)
                return made
            except InvalidConfig as error:
                self._errors.append(renamed(error, self._given, path))
                place = self._blamed(error, kind, path)
                if place is None or place.default is MISSING or place.name not in values:
                    return None
                del values[place.name]

    def _blamed(self, error: InvalidConfig, kind: type, path: str) -> Place | None:
        found = locate(error.field.partition(", ")[0], path)
        if found is None:
            return None
        return next(p for p in within(kind, path).values() if found == p.path or found.startswith(f"{p.path}."))

    def _names(self, paths: list[str]) -> str:
        return ", ".join(sorted(named(path, self._given) for path in paths))


def named(path: str, given: Mapping[str, Given]) -> str:
    """What a setting is called where it was given; else by its flag, or by its path."""
    if path in given:
        return given[path].name
    return BY_PATH[path].option if path in BY_PATH else path


def renamed(error: InvalidConfig, given: Mapping[str, Given], path: str = "") -> InvalidConfig:
    """The same error with the names under which its settings were given.

    Args:
        path: of the dataclass that raised it.
    """
    # What follows a colon is about something in a file that the setting names.
    fields = [error.field] if ": " in error.field else error.field.split(", ")
    return InvalidConfig(", ".join(_renamed(each, given, path) for each in fields), error.value, error.allowed)


def _renamed(field: str, given: Mapping[str, Given], path: str) -> str:
    found = locate(field, path)
    if found is None or (PLACES[found].section is not None and found not in given):
        return field
    inner = re.search(r"[\[:].*", field)
    return named(found, given) + (inner[0] if inner is not None else "")


def secret(path: str, name: str) -> bytes:
    """The bytes of a file that its owner alone may read.

    Args:
        name: of the setting, for errors.

    Raises:
        InvalidConfig: it is none, or holds too few or too many bytes.
    """
    allowed = f"a file of 16 to {_MAX_SECRET} bytes that belongs to you, mode 0600"
    try:
        handle = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                what = f"mode {stat.filemode(found.st_mode)}, of user {found.st_uid}"
                raise InvalidConfig(name, f"{path}, {what}", allowed)
            read = file.read(_MAX_SECRET + 1)
    except OSError as error:
        raise InvalidConfig(name, f"{path}, {error.strerror}", allowed) from error
    if not 16 <= len(read) <= _MAX_SECRET:
        raise InvalidConfig(name, f"{path}, {found.st_size} bytes", allowed)
    return read

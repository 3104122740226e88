"""Where settings come from: the command line, the environment, and a file. Each says what it says by paths."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from blend.decoding import read_yaml
from blend.errors import InvalidConfig, InvalidInput
from blend.names import unknown
from blend_server.settings.errors import noted
from blend_server.settings.places import PLACES, CommandConfig, Place, below, join, within
from blend_server.settings.table import BY_PATH, BY_VARIABLE, FLAGS, VARIABLES, Flag
from blend_server.settings.values import checked, from_text

CONFIG_VARIABLE = "BLEND_CONFIG"
"""The variable that stands for ``--config``."""
REFUSED = object()
"""Stands for a value that was refused, which is another thing than none."""
_MAX_NBYTES = 1 << 20
# What Kubernetes puts in the environment of every container where a service is called "blend-server", or begins so.
_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


@dataclass(frozen=True)
class Given:
    """What one source says of a setting, or of whether an optional section is there (``{}``, or ``None``).

    ``name`` is what the setting is called there, ``origin`` which source it is.
    """

    value: object
    name: str
    origin: str


Layer: TypeAlias = dict[str, Given]
"""What one source says, by path."""


def from_flags(arguments: argparse.Namespace, errors: list[InvalidConfig]) -> Layer:
    """What the command line says. What is wrong with it is added to ``errors``; so it is for the other sources."""
    words = vars(arguments)
    layer: Layer = {}
    for flag in FLAGS:
        if flag.name in words:
            layer[flag.path] = _told(flag, words[flag.name], flag.option, errors)
    return layer


def from_environment(environ: Mapping[str, str], errors: list[InvalidConfig]) -> Layer:
    """What the variables say whose names begin with ``BLEND_SERVER_``."""
    layer: Layer = {}
    for name, text in environ.items():
        if not name.startswith(VARIABLES) or _KUBERNETES.fullmatch(name.removeprefix(VARIABLES)):
            continue
        with noted(errors):
            if name not in BY_VARIABLE:
                raise _unknown_variable(name)
            flag = BY_VARIABLE[name]
            layer[flag.path] = _told(flag, text, name, errors)
    return layer


def from_file(path: str, name: str, errors: list[InvalidConfig]) -> Layer:
    """What a file says; ``name`` is the flag or the variable that names it."""
    layer: Layer = {}
    with noted(errors):
        found = read_yaml(_text(path, name), path)
        if found is not None:
            _flatten(found, "", path, layer, errors)
    return layer


def merged(*layers: Layer) -> Layer:
    """What several sources say together; of two that differ, the later is right.

    One that leaves an optional section out takes what earlier ones say of it along. One that says something of a
    section which an earlier one leaves out brings it back, unless a flag of its own decides that.
    """
    found: Layer = {}
    for layer in layers:
        for path, given in layer.items():
            if given.value is None:
                for lower in below(found, path):
                    del found[lower]
        for path in [path for path, given in found.items() if given.value is None and PLACES[path].section]:
            if path not in BY_PATH and below(layer, path):
                del found[path]
        found.update(layer)
    return found


def _told(flag: Flag, text: object, name: str, errors: list[InvalidConfig]) -> Given:
    """What a flag or a variable says. A flag without a value is there as a truth."""
    place = PLACES[flag.path]
    said: object = REFUSED
    with noted(errors):
        said = from_text(flag, text, name) if isinstance(text, (str, list)) else text
    return _given(place, said, name, name, errors)


def _unknown_variable(name: str) -> InvalidInput:
    if name == f"{VARIABLES}CONFIG":
        return InvalidInput("a variable", name, f"{CONFIG_VARIABLE}, which names the file")
    near = get_close_matches(name, BY_VARIABLE, n=1)
    what = f"{near[0]} (the nearest)" if near else "the name of a flag in capitals behind it; see --help"
    return InvalidInput("a variable", name, what)


def _given(place: Place, value: object, name: str, origin: str, errors: list[InvalidConfig]) -> Given:
    made: object = REFUSED
    if value is not REFUSED:
        with noted(errors):
            try:
                made = value if place.section is not None else checked(place, value, name)
            except InvalidConfig as error:  # of a dataclass, which does not know how it is called here
                raise InvalidConfig(name, error.value, error.allowed) from error
    return Given(made, name, origin)


def _text(path: str, name: str) -> str:
    allowed = f"a file in UTF-8 of at most {_MAX_NBYTES} bytes"
    try:
        file = Path(os.path.expanduser(path))
        if not file.exists():
            raise InvalidConfig(name, f"{path}, no such file", allowed)
        if not file.is_file():
            raise InvalidConfig(name, f"{path}, no regular file", allowed)
        if (size := file.stat().st_size) > _MAX_NBYTES:
            raise InvalidConfig(name, f"{path}, {size} bytes", allowed)
        return file.read_text("utf-8")
    except OSError as error:
        raise InvalidConfig(name, f"{path}, {error.strerror}", allowed) from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(name, f"{path}, byte {error.start}", allowed) from error


def _flatten(found: object, path: str, file: str, layer: Layer, errors: list[InvalidConfig]) -> None:
    """Add what a section of the file says, and the sections in it."""
    if not isinstance(found, Mapping):
        errors.append(InvalidConfig(_name(file, path), found, "names of settings with their values"))
        return
    known = within(PLACES[path].section or CommandConfig, path) if path else within(CommandConfig)
    for key, value in found.items():
        place, name = known.get(key), _name(file, join(path, str(key)))
        if place is None:
            with noted(errors):
                raise _unknown(file, path, key, list(known))
        elif place.section is None:
            layer[place.path] = _given(place, value, name, file, errors)
        else:
            if place.optional:
                layer[place.path] = Given(None if value is None else {}, name, file)
            if value is not None:  # a section whose settings are all commented out
                _flatten(value, place.path, file, layer, errors)


def _name(file: str, path: str) -> str:
    """What a setting of a file is called."""
    return f"{file}: {path}" if path else file


def _unknown(file: str, path: str, key: object, known: list[str]) -> InvalidInput:
    """The error for a key that is none of a section's; it may be one of another's, or the name of a flag."""
    what = f"{file}: a setting of {path}" if path else f"{file}: a setting"
    name = str(key).replace("-", "_")
    belongs = {place.path for place in PLACES.values() if place.key == name}
    belongs |= {flag.path for flag in FLAGS if flag.name.replace("-", "_") == name}
    if belongs and name not in known:
        return InvalidInput(what, key, f"{' or '.join(sorted(belongs))}, where it belongs")
    return unknown(what, key, known)

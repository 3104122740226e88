"""Settings as text: what holds, and where it is from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from blend.decoding import encode
from blend.sizes import show_size
from blend_server.settings.places import CommandConfig, Place, within
from blend_server.settings.reading import Settings

_HIDDEN = "(hidden)"
_SECRETS = re.compile(r"(.*[_-])?(token|secret|password|key)", re.IGNORECASE)
"""Names, in mappings whose names are another program's, of what nobody should see."""


def shown(settings: Settings) -> str:
    """Return the settings in YAML, as :func:`~blend_server.settings.reading.read` reads it.

    Behind each value that is no default stands where it is from. Of secrets there is the path of their file; what
    names of another program's settings tell to be one, such as ``hf_token`` of vLLM's, is hidden.
    """
    return "".join(f"{line}\n" for line in _section(settings, CommandConfig, settings.config, "", 0))


def _section(settings: Settings, kind: type, section: object, path: str, depth: int) -> Iterator[str]:
    for place in within(kind, path).values():
        value = getattr(section, place.name)
        given = settings.given.get(place.path)
        start, told = f"{'  ' * depth}{place.key}:", f"  # {_printable(given.origin)}" if given is not None else ""
        if place.section is None or value is None:
            yield f"{start} {_value(place, value if not place.secret else given and given.value)}{told}"
        else:
            yield start + (told if place.optional else "")
            yield from _section(settings, place.section, value, place.path, depth + 1)


def _value(place: Place, value: object) -> str:
    if place.size and isinstance(value, int):
        return show_size(value)
    plain = yaml.safe_dump(_plain(value), default_flow_style=True, allow_unicode=True, width=float("inf"))
    return str(plain).removesuffix("\n").removesuffix("\n...")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _plain(value: object) -> object:
    """A value as YAML has it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _HIDDEN if _SECRETS.fullmatch(str(name)) else _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(encode(inner)) for inner in value]
    return value

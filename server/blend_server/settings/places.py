"""Where each setting is: the fields of the dataclasses below :class:`CommandConfig`, as paths.

A section is a field that holds a dataclass, or one or nothing; every other field is a setting. A secret is set by the
path of the file that holds it, so ``engine.store.secret`` goes by ``engine.store.secret_file``.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from blend.config import ServerConfig
from blend.decoding import hints


@dataclass(frozen=True)
class CommandConfig(ServerConfig):
    """The service, and what its command does besides.

    Args:
        ready_file: the bound address is written there once requests are served.
    """

    ready_file: str | Path | None = None

    @property
    def service(self) -> ServerConfig:
        """The service's own settings."""
        return ServerConfig(**{f.name: getattr(self, f.name) for f in fields(ServerConfig)})


@dataclass(frozen=True)
class Place:
    """One field.

    Attributes:
        name: the field's own.
        path: where it is, from the root.
        kind: what its annotation allows.
        default: its default; ``MISSING`` where it has to be given.
        section: the dataclass that it holds, if it is a section.
    """

    name: str
    path: str
    kind: Any
    default: object
    section: type | None

    @property
    def kinds(self) -> tuple[Any, ...]:
        """What it may be, apart from ``None``."""
        union = get_origin(self.kind) in (Union, types.UnionType)
        return tuple(kind for kind in (get_args(self.kind) if union else (self.kind,)) if kind is not type(None))

    @property
    def optional(self) -> bool:
        """Whether it may be ``None``."""
        return type(None) in get_args(self.kind)

    @property
    def secret(self) -> bool:
        """Whether it is set by the path of a file."""
        return bytes in self.kinds

    @property
    def size(self) -> bool:
        """Whether it is a number of bytes."""
        return int in self.kinds and self.name.endswith("_bytes")

    @property
    def key(self) -> str:
        """The last part of its path: its key in the file."""
        return self.path.rpartition(".")[2]


@cache
def within(kind: type, path: str = "") -> dict[str, Place]:
    """The fields of a dataclass at ``path``, by their keys."""
    found = {}
    for f in fields(kind):
        annotation = hints(kind)[f.name]
        place = Place(f.name, f.name, annotation, MISSING, None)
        key = f"{f.name}_file" if place.secret else f.name
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        inner = place.kinds[0] if len(place.kinds) == 1 and is_dataclass(place.kinds[0]) else None
        section = inner if isinstance(inner, type) else None
        found[key] = Place(f.name, join(path, key), annotation, default, section)
    return found


def join(path: str, key: str) -> str:
    """The path of a key below ``path``; the root's is empty."""
    return f"{path}.{key}" if path else key


def below(paths: Iterable[str], path: str) -> list[str]:
    """Those of some paths that lie below one."""
    return [each for each in paths if not path or each.startswith(f"{path}.")]


def _walk(kind: type, path: str) -> Iterator[Place]:
    for place in within(kind, path).values():
        yield place
        if place.section is not None:
            yield from _walk(place.section, place.path)


PLACES = {place.path: place for place in _walk(CommandConfig, "")}
"""Every section and setting, by its path."""


def locate(field: str, path: str = "") -> str | None:
    """The path of what an error's ``field`` means, as the dataclass at ``path``, or code that uses it, calls it.

    ``store.host_bytes`` and ``store.tenant_quotas['acme']`` are found by how their paths end. ``None``: it means no
    setting.
    """
    stem = field.partition(": ")[0].partition("[")[0]
    while stem:
        ends = [each for each in below(_NAMED, path) if f".{each}".endswith(f".{stem}")]
        if ends:
            return _NAMED[min(ends, key=lambda each: each.count("."))]
        stem = stem.rpartition(".")[0]
    return None


# By the names of their fields, and so a secret without "_file".
_NAMED = {join(place.path.rpartition(".")[0], place.name): place.path for place in PLACES.values()}

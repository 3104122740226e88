"""Dataclasses from JSON and YAML, and back: every value is checked against the annotation of its field."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from blend.errors import InvalidInput
from blend.names import unknown

T = TypeVar("T")

_SCALARS = {str: "a text", bool: "true or false", int: "an integer", float: "a finite number", Path: "a path"}


def decode(kind: type[T], value: object, where: str) -> T:
    """Return ``value``, as JSON or YAML has it, as a ``kind``.

    Known kinds: dataclasses, ``str``, ``bool``, ``int``, ``float``, ``Path``, ``Literal``, tuples, ``Mapping`` with
    names as keys, unions of these, and ``object`` or ``Any`` for what is kept as it is. Integers pass for floats,
    booleans for nothing else.

    Args:
        where: the place of the value, for errors.

    Raises:
        InvalidInput: a value is of another kind, a field is missing, or a key is unknown (with the nearest).
    """
    found: T = _decode(kind, value, where)
    return found


def encode(value: object) -> Any:
    """Return dataclasses as dictionaries and tuples as lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner) for inner in value]
    return value


def read_yaml(text: str, where: str) -> object:
    """Return what a text in YAML says, as plain values alone.

    Args:
        where: the place of the text, for errors.

    Raises:
        InvalidInput: it is no YAML, or a key stands twice in one mapping.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Never the line itself, which may hold what is nobody's business.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        at = f"line {mark.line + 1}: " if mark is not None else ""
        said = problem or " ".join(str(error).split())
        raise InvalidInput(where, f"{at}{said}", "YAML, each key once in its mapping") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """Refuses a key that stands twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
            seen.add(str(key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def hints(kind: type) -> dict[str, Any]:
    """Return the annotations of a dataclass, resolved, by field."""
    return _hints(kind)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)  # which parses every annotation, and is asked for thousands of records


def _decode(kind: Any, value: object, where: str) -> Any:
    origin = get_origin(kind)
    if kind is object or kind is Any:
        return value
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), value, where)
    if origin is Literal:
        if value not in get_args(kind):
            raise unknown(where, value, [str(name) for name in get_args(kind)])
        return value
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(get_args(kind)[1], value, where)
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: object, where: str) -> Any:
    if kind is float and type(value) in (int, float):
        number = _as_float(value)
        if math.isfinite(number):
            return number
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif type(value) is kind:
        return value
    raise InvalidInput(where, value, _SCALARS.get(kind, "nothing"))


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond a float's range
        return math.inf


def _union(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    possible = [kind for kind in kinds if kind is not type(None)]
    if len(possible) == 1:
        return _decode(possible[0], value, where)
    for kind in possible:
        try:
            return _decode(kind, value, where)
        except InvalidInput:
            continue
    raise InvalidInput(where, value, " or ".join(_SCALARS.get(kind, str(kind)) for kind in possible))


def _tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(where, value, "a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise InvalidInput(where, value, f"a list of {len(kinds)}")
    return tuple(
        _decode(kind, inner, f"{where}[{i}]") for i, (kind, inner) in enumerate(zip(kinds, value, strict=True))
    )


def _mapping(kind: Any, value: object, where: str) -> dict[str, Any]:
    named = _object(value, where)
    return {name: _decode(kind, inner, f"{where}.{name}") for name, inner in named.items()}


def _dataclass(kind: Any, value: object, where: str) -> Any:
    named = _object(value, where)
    known = {f.name: f for f in fields(kind)}
    for name in named:
        if name not in known:
            raise unknown(f"{where}: a field", name, known)
    for name, f in known.items():
        if name not in named and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidInput(where, f"no field {name}", f"all of: {', '.join(known)}")
    return kind(**{name: _decode(hints(kind)[name], inner, f"{where}.{name}") for name, inner in named.items()})


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidInput(where, value, "names with values")
    return value

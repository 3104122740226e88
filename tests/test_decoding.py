"""Dataclasses from plain values, and YAML that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from blend.decoding import decode, encode, read_yaml
from blend.errors import InvalidInput


@dataclass(frozen=True)
class Inner:
    name: str
    where: Path = Path(".")


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...] = ()
    level: Literal["low", "high"] = "low"
    share: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def test_values_become_what_the_annotations_say() -> None:
    found = decode(
        Outer,
        {"inner": [{"name": "a", "where": "b/c"}], "level": "high", "share": 1, "more": {"any": [1, {"thing": None}]}},
        "here",
    )
    assert found == Outer((Inner("a", Path("b/c")),), "high", 1.0, {"any": [1, {"thing": None}]})
    assert isinstance(found.share, float)
    assert encode(found.more) == {"any": [1, {"thing": None}]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"inner": [{"name": "a"}, {"nam": "b"}]}, r"here.inner\[1\]: a field: got 'nam'; allowed: name"),
        ({"inner": [{}]}, r"here.inner\[0\]: got 'no field name'"),
        ({"inner": [{"name": "a", "where": 5}]}, r"here.inner\[0\].where: got 5; allowed: a path"),
        ({"level": "hi"}, "here.level: got 'hi'; allowed: high"),
        ({"share": True}, "here.share: got True; allowed: a finite number"),
        ({"more": {1: 2}}, "here.more: got {1: 2}; allowed: names with values"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        decode(Outer, value, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "file: got 'line 3: a stands there twice'"),
        ("a: {b: 1, b: 1}", "line 1: b stands there twice"),
        ("a: [secret", "line 1: "),
        ("a: !!python/name:os.system", "line 1: could not determine a constructor"),
    ],
)
def test_yaml_is_refused_by_its_line_and_never_quoted(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        read_yaml(text, "file")
    assert "secret" not in str(raised.value)


def test_yaml_is_plain_values() -> None:
    assert read_yaml("a: [1, 2.5, text, null]", "file") == {"a": [1, 2.5, "text", None]}
    assert read_yaml("", "file") is None

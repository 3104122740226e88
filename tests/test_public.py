"""The public names: sorted, importable, documented, and typed errors all in one tree."""

from __future__ import annotations

import inspect

import pytest

import blend
from blend import errors
from blend.errors import BlendError


def test_the_public_names_are_sorted_and_there() -> None:
    assert blend.__all__ == sorted(set(blend.__all__))
    assert [name for name in blend.__all__ if not hasattr(blend, name)] == []


@pytest.mark.parametrize("name", blend.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(blend, name))


@pytest.mark.parametrize(
    "name", [n for n in dir(blend.Engine) if not n.startswith("_") and callable(getattr(blend.Engine, n))]
)
def test_a_public_method_of_the_engine_is_documented(name: str) -> None:
    method = getattr(blend.Engine, name)
    assert inspect.getdoc(method)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        blend.no_such_name  # noqa: B018


def test_every_error_is_in_the_tree_and_drawn_in_it() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert all(issubclass(kind, BlendError) for kind in kinds)
    assert [kind.__name__ for kind in kinds if kind.__name__ not in (errors.__doc__ or "")] == []

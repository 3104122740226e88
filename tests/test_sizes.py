from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidInput
from blend.sizes import MOST_BYTES, parse_size, show_size


@given(st.integers(0, MOST_BYTES))
def test_a_size_survives_being_shown(nbytes: int) -> None:
    assert parse_size(show_size(nbytes)) == parse_size(f" {nbytes} ") == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("7 kib", 7168), ("1.5GiB", 3 << 29), ("0.3", 0), ("9007199254740993", 2**53 + 1), ("2TIB", 2 << 40)],
)
def test_sizes_are_exact(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1GB",
        "1e3",
        "nan",
        "inf",
        ".5",
        "1.",
        "\u0661",
        "1 2",
        "9" * 400 + "TiB",
        "9" * 9000,
        "8388608TiB",
    ],
)
def test_what_is_none_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(InvalidInput, match=f"1.5GiB, at most {MOST_BYTES}"):
        parse_size(text)


def test_a_size_may_have_a_limit_of_its_own() -> None:
    assert parse_size("1KiB", most=1024) == 1024
    with pytest.raises(InvalidInput, match="at most 1024"):
        parse_size("1025", most=1024)

"""What is wrong with settings, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blend.errors import BlendError, InvalidConfig, InvalidInput


class Refused(BlendError):
    """Settings that cannot be used. ``errors`` has each reason, and names what the operator wrote."""

    def __init__(self, errors: Sequence[InvalidConfig]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


@contextmanager
def noted(errors: list[InvalidConfig]) -> Iterator[None]:
    """Add what is wrong in the ``with`` block to ``errors``, and go on behind it."""
    try:
        yield
    except InvalidInput as error:
        errors.append(InvalidConfig(error.field, error.value, error.allowed))

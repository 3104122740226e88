"""Bytes-like values as flat views: the one place where the store looks at other people's buffers."""

from __future__ import annotations

from typing import Any, TypeVar, Union

import numpy as np
import numpy.typing as npt

from blend.errors import InvalidInput, TierUnavailable

Buffer = Union[bytes, bytearray, memoryview, "npt.NDArray[Any]"]
"""What the store takes as bytes: anything C-contiguous with a buffer."""

ALIGN = 64
"""A cache line, enough for any vector load. The system copies several times slower to what begins in between."""

_Error = TypeVar("_Error", bound=BaseException)


def flat(field: str, data: Buffer) -> memoryview:
    """Return ``data`` as a one-dimensional view of bytes, without a copy.

    Raises:
        InvalidInput: ``data`` has no buffer, or its memory has gaps.
    """
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidInput(field, type(data).__name__, "a C-contiguous buffer") from error


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` of uninitialised memory that begins at a multiple of :data:`ALIGN`.

    Raises:
        TierUnavailable: the system has none.
    """
    try:
        memory = np.empty(nbytes + ALIGN, dtype=np.uint8)
    except MemoryError as error:
        raise TierUnavailable(f"the system has no memory for {nbytes} bytes") from error
    start = -memory.__array_interface__["data"][0] % ALIGN
    return memory[start : start + nbytes]


class Coverage:
    """Which bytes of an object have been written, as merged half-open intervals."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Mark ``[start, stop)`` as written."""
        if start == stop:
            return
        kept = []
        for low, high in self._spans:
            if high < start or low > stop:
                kept.append((low, high))
            else:
                start, stop = min(start, low), max(stop, high)
        kept.append((start, stop))
        self._spans = sorted(kept)

    def first_gap(self, nbytes: int) -> int | None:
        """Return the first byte below ``nbytes`` that has not been written, or ``None``."""
        reached = self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0
        return reached if reached < nbytes else None


def bare(error: _Error) -> _Error:
    """Return the error without frames and causes: kept with them, it would keep all views that those frames have."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)

"""Memory of canvases that are gone, kept for the next ones.

The first touch of fresh pages takes several times as long as filling them, and every request has a canvas of its own.
"""

from __future__ import annotations

import threading
import weakref
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGN = 64
"""Memory begins at a cache line: no vector is then split between two."""

_LEAST_BYTES = 2**20
"""Less is not kept: it costs nothing to have it anew."""

_STEPS = 8
"""Sizes are rounded up to one of so many between two powers of two, for prompts are seldom of one length. Pages that
nobody touches take no memory."""

_Buffer: TypeAlias = npt.NDArray[np.uint8]


class KeptMemory:
    """Gives out memory on the CPU, and keeps what comes back: the largest buffers, as far as the limit goes.

    A buffer comes back when no tensor refers to it any more, be it a view that outlives what it was made for.
    From any thread.

    Args:
        limit: most bytes that are kept, those given out not counted; 0 or more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The garbage collector may give a buffer back while this thread holds the lock.
        self._lock = threading.RLock()
        self._kept: tuple[_Buffer, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(buffer.nbytes for buffer in self._kept)

    def zeros(self, nbytes: int) -> Tensor:
        """Return ``[nbytes]`` uint8 zeros that begin at a cache line."""
        if nbytes < _LEAST_BYTES:
            return _aligned(_fresh(nbytes), nbytes)
        kept = self._take(nbytes + _ALIGN)
        buffer = _fresh(_rounded(nbytes)) if kept is None else kept
        seen = buffer[:]  # lives as long as a tensor refers to it
        weakref.finalize(seen, self._keep, buffer).atexit = False
        memory = _aligned(seen, nbytes)
        return memory if kept is None else memory.zero_()

    def release(self) -> None:
        """Give back to the system what is kept."""
        with self._lock:
            self._kept = ()

    def _take(self, nbytes: int) -> _Buffer | None:
        """The smallest kept buffer that is large enough."""
        with self._lock:
            found = min((b for b in self._kept if b.nbytes >= nbytes), key=lambda b: b.nbytes, default=None)
            self._kept = tuple(buffer for buffer in self._kept if buffer is not found)
        return found

    def _keep(self, buffer: _Buffer) -> None:
        with self._lock:
            kept: list[_Buffer] = []
            room = self._limit
            for each in sorted((buffer, *self._kept), key=lambda b: b.nbytes, reverse=True):
                if each.nbytes <= room:
                    kept.append(each)
                    room -= each.nbytes
            self._kept = tuple(kept)


def _fresh(nbytes: int) -> _Buffer:
    # numpy leaves zeroing to the first touch and asks for huge pages, which makes that three times as fast.
    return np.zeros(nbytes + _ALIGN, np.uint8)


def _rounded(nbytes: int) -> int:
    step = (1 << (nbytes.bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


def _aligned(buffer: _Buffer, nbytes: int) -> Tensor:
    memory = torch.from_numpy(buffer)
    start = -memory.data_ptr() % _ALIGN
    return memory[start : start + nbytes]


KEPT = KeptMemory(2**30)
"""What canvases are made of."""

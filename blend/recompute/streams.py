"""Copies to a device beside what it computes: streams, events, and memory of the host that it can read by itself.

:class:`Streams` is the seam. On CUDA it is torch's streams and events; elsewhere all is done when a call returns.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every GPU of the process."""


class Event(Protocol):
    """A point in a stream: done when all is that was issued to the stream before it."""

    def query(self) -> bool:
        """Return whether it is done."""

    def synchronize(self) -> None:
        """Have the caller wait until it is done."""


class Streams(Protocol):
    """Two streams of one device: the current one, where passes compute, and another one for copies.

    What is issued to a stream is done in order. Between two streams, events make the order.
    """

    def copying(self) -> AbstractContextManager[object]:
        """Within it the stream of copies is the current one."""

    def record(self) -> Event:
        """Return an event of the current stream, after all that has been issued to it."""

    def wait(self, event: Event) -> None:
        """Have what is issued to the current stream from now on wait for ``event``. The caller does not."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy from the host to the device.

        Args:
            target: on the device, contiguous.
            source: of the same shape and dtype, in memory that :meth:`reads`; to be held as it is until an event after
                the copy is done.
        """

    def reads(self, source: Tensor) -> bool:
        """Return whether the device can read a tensor of the host while the host goes on: it lies in pinned memory."""

    def staging(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` of the host's memory that :meth:`reads`: ``[nbytes]`` uint8, uninitialised."""


@cache
def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device; its stream of copies is one for the whole process."""
    return _Cuda(device) if device.type == "cuda" else _Immediate()


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager[object]:
        return _on(self._copies)

    def record(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def reads(self, source: Tensor) -> bool:
        return source.is_pinned()

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream):
        yield


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Immediate:
    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return _Done()

    def wait(self, event: Event) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def reads(self, source: Tensor) -> bool:
        return source.device.type == "cpu"

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def pinned_for(device: torch.device) -> Callable[[int], npt.NDArray[np.uint8]] | None:
    """Return what allocates large memory that ``device`` can read by itself; ``None`` where any memory is such.

    Torch's own allocator of pinned memory would round up to a power of two, and keep what it is given back.
    """
    return partial(_pinned, device) if device.type == "cuda" else None


def _pinned(device: torch.device, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``[nbytes]`` uint8, pinned for as long as a view of it lives. Where CUDA refuses, that is a warning.

    Raises:
        MemoryError: the system has none.
    """
    memory = np.empty(nbytes, np.uint8)
    cudart: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    error = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
    if error != cudart.cudaError.success:
        reason = cudart.cudaGetErrorString(error)
        _log.warning("%d bytes of host memory could not be pinned (%s): they are copied once more", nbytes, reason)
        # CUDA keeps the error for whoever asks next, and torch asks after every kernel: one is run for it to be taken.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        return memory
    # An array calls its finalizers before it gives its memory back.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory

"""Layers of stored chunks on their way from the host to the device, beside what the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from blend.errors import Closed, InvalidInput
from blend.recompute.streams import Event, Streams

SLOTS = 2
"""Layers that have memory on the device: one that is placed, and the next one, which is copied meanwhile."""

_BUFFERS = 4
"""Staging buffers of one request: one is written by the host while the device reads the others."""


@dataclass
class _Slot:
    """Memory on the device for one layer of all chunks. ``layer`` is the one that it holds or gets, if any.

    ``copied`` is the event of its copies; before ``free`` is done the memory is read, or not even ours.
    """

    free: Event
    layer: int | None = None
    copied: Event | None = None


class Transfers:
    """Copies one layer of all chunks of a request at a time, on the stream of copies.

    A layer's copies may start while the layer before it is placed and computed (:meth:`start`); what works on a layer
    waits for that layer alone (:meth:`layer`). The host waits for neither, but for a staging buffer where it is faster
    than the device. What is copied from is held until the device has read it.

    Args:
        spans: for each chunk the first of its tokens that is copied, and how many are.
        like: the canvas, ``[L, KVH, N, D]``: KVH, D, dtype and device are its.
        streams: of its device.

    Attributes:
        targets: for each chunk ``[SLOTS, 2, KVH, T, D]`` on the device, keys then values, one slot a layer.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], like: Tensor, streams: Streams) -> None:
        _, heads, _, dims = like.shape
        self._dtype = like.dtype
        self._streams = streams
        self._firsts = [first for first, _ in spans]
        # A tensor made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            shapes = [(SLOTS, 2, heads, tokens, dims) for _, tokens in spans]
            self.targets = tuple(torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes)
        largest = max((target[0].nbytes for target in self.targets), default=0)
        self._staging = _Staging(largest, streams)
        # The device may not be done yet with what had this memory before.
        free = streams.record()
        self._slots = [_Slot(free) for _ in range(SLOTS)]
        self._under_way: deque[tuple[Event, tuple[Tensor, ...]]] = deque()
        self._closed = False

    def start(self, layer: int, kv: Sequence[Tensor]) -> None:
        """Start to copy a layer, unless it was started before.

        Args:
            layer: which layer. Its slot's last layer must have been placed.
            kv: for each chunk ``[2, KVH, T, D]`` in the host's memory, in the canvas's dtype, T at least what its
                span reaches to.

        Raises:
            InvalidInput: not one such tensor for each chunk, or the slot is not free.
            Closed: the transfers were closed.
        """
        if self._closed:
            raise Closed("the transfers of this request were closed")
        slot = self._slots[layer % SLOTS]
        if slot.layer == layer:
            return
        if slot.layer is not None:
            raise InvalidInput("layer", layer, f"another one, until layer {slot.layer} has been placed")
        self._check(kv)
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        sources = tuple(kv)
        with self._streams.copying():
            self._streams.wait(slot.free)
            try:
                for target, source, first in zip(self.targets, sources, self._firsts, strict=True):
                    self._copy(target[layer % SLOTS], source[:, :, first:])
            finally:  # what has been issued is waited for, whatever became of the rest
                copied = self._streams.record()
                self._under_way.append((copied, sources))
        slot.layer, slot.copied = layer, copied

    def _copy(self, target: Tensor, source: Tensor) -> None:
        wanted = source[:, :, : target.shape[2]]
        if wanted.is_contiguous() and self._streams.reads(wanted):
            self._streams.copy(target, wanted)
        else:
            self._staging.copy(target, wanted)

    @contextmanager
    def layer(self, layer: int, kv: Sequence[Tensor]) -> Iterator[int]:
        """Give the slot that a layer is in, for what is issued to the current stream inside the ``with`` block.

        That waits, on the device, for the layer's copies; the slot is free again when it is done. Arguments and errors
        are those of :meth:`start`, which is called first.
        """
        self.start(layer, kv)
        slot = self._slots[layer % SLOTS]
        assert slot.copied is not None
        self._streams.wait(slot.copied)
        try:
            yield layer % SLOTS
        finally:
            slot.free, slot.layer, slot.copied = self._streams.record(), None, None

    def close(self) -> None:
        """Wait until nothing is copied any more, and let go of what was copied from. Safe to call again."""
        self._closed = True
        while self._under_way:
            self._under_way[0][0].synchronize()
            self._under_way.popleft()

    def _check(self, kv: Sequence[Tensor]) -> None:
        if len(kv) != len(self.targets):
            raise InvalidInput("kv", f"{len(kv)} tensors", f"one for each of the {len(self.targets)} pieces")
        for target, source, first in zip(self.targets, kv, self._firsts, strict=True):
            _, two, heads, tokens, dims = target.shape
            shape = tuple(source.shape)
            if len(shape) != 4 or shape[2] < first + tokens or (shape[0], shape[1], shape[3]) != (two, heads, dims):
                raise InvalidInput("kv", shape, f"({two}, {heads}, {first + tokens} or more, {dims})")
            if source.dtype != self._dtype or source.device.type != "cpu":
                raise InvalidInput("kv", f"{source.dtype}, {source.device}", f"{self._dtype} in host memory")


class _Staging:
    """A ring of pinned buffers, for what the device cannot read by itself; allocated when first used.

    Args:
        nbytes: size of each.
        streams: of the device.
    """

    def __init__(self, nbytes: int, streams: Streams) -> None:
        self._nbytes = nbytes
        self._streams = streams
        self._ring: deque[tuple[Tensor, Event]] = deque()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source`` to a buffer now, and issue the copy from there to ``target``. To be called while copying."""
        buffer = self._take()
        part = buffer[: prod(source.shape) * source.dtype.itemsize].view(source.dtype).view(source.shape)
        part.copy_(source)
        try:
            self._streams.copy(target, part)
        finally:
            self._ring.append((buffer, self._streams.record()))

    def _take(self) -> Tensor:
        """Return a buffer that the device has read."""
        if self._ring and (len(self._ring) == _BUFFERS or self._ring[0][1].query()):
            buffer, read = self._ring.popleft()
            read.synchronize()
            return buffer
        with torch.inference_mode(False):
            return self._streams.staging(self._nbytes)

"""Where the keys and values of a batch lie: one canvas a request, or blocks that requests share.

A kernel gets one base tensor and a table, so that one launch serves any number of requests:

- :class:`Canvases`: for each request the distance of its canvas from the first one and its strides.
- :class:`Pages`: for each request its block table, as paged attention has it (Kwon et al., SOSP 2023).

Both are made once a pass; a kernel gets the layer as a number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blend.errors import InvalidInput

ALIGNMENT = 16
"""Bytes that one thread reads at once; the start of every head's row of D numbers is a multiple of it."""


@dataclass(frozen=True, eq=False)
class Addresses:
    """What a kernel needs to find any key or value of one layer.

    ``table`` is ``[B, 4]`` int64 for canvases: distance of keys and of values from the base tensors, strides of
    layer and head, in numbers; the token stride is D. For pages it is ``[B, M]`` int32, and ``block_stride``,
    ``token_stride`` and ``head_stride`` hold for all requests. ``page`` is the block size, 0 for canvases.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    layer: int
    block_stride: int = 0
    token_stride: int = 0
    head_stride: int = 0
    page: int = 0

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """In the order in which every kernel takes them."""
        strides = (self.block_stride, self.token_stride, self.head_stride)
        return (self.key, self.value, self.table, self.table.shape[1], self.layer, *strides)


class Memory(ABC):
    """The keys and values of B requests in all layers."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    @abstractmethod
    def requests(self) -> int:
        """B."""

    @property
    @abstractmethod
    def kv_heads(self) -> int:
        """KVH."""

    @property
    def head_dim(self) -> int:
        """D."""
        return self.keys[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Of keys and values."""
        return self.keys[0].device

    @abstractmethod
    def capacity(self, request: int) -> int:
        """How many positions there are for a request."""

    @abstractmethod
    def views(self, request: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[KVH, length, D]`` of a request's first positions."""

    @abstractmethod
    def write(self, request: int, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Put ``key`` and ``value`` ``[KVH, R, D]`` at ``positions`` ``[R]``, in plain torch."""

    @abstractmethod
    def addresses(self, layer: int) -> Addresses:
        """For a kernel that works on ``layer``."""


class Canvases(Memory):
    """Keys and values of B requests, ``[L, KVH, N, D]`` each; N differs from request to request.

    Args:
        keys, values: one tensor a request, in one dtype on one device; a request's keys and values have the same
            strides. Addresses are to be had only where a token's D numbers, and the tokens of a head, lie side by
            side, each head's from a multiple of 16 bytes on; layers and heads may be strided.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        if not keys or len(keys) != len(values):
            raise InvalidInput("canvases", (len(keys), len(values)), "as many keys as values, one or more")
        self.keys = tuple(keys)
        self.values = tuple(values)
        first = keys[0]
        if first.ndim != 4:
            raise InvalidInput("canvas", tuple(first.shape), "[L, KVH, N, D]")
        for key, value in zip(keys, values, strict=True):
            for tensor in (key, value):
                if _kind(tensor) != _kind(first):
                    raise InvalidInput("canvas", _kind(tensor), f"L, KVH, D, dtype and device as {_kind(first)}")
            if key.shape != value.shape or key.stride() != value.stride():
                raise InvalidInput("canvas", (key.stride(), value.stride()), "keys and values of one layout")

    @property
    def requests(self) -> int:
        """B."""
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        """KVH."""
        return self.keys[0].shape[1]

    def capacity(self, request: int) -> int:
        """N, the number of positions of a request."""
        return self.keys[request].shape[2]

    def views(self, request: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[KVH, length, D]`` of a request's first positions: views, not copies."""
        return self.keys[request][layer, :, :length], self.values[request][layer, :, :length]

    def write(self, request: int, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Put ``key`` and ``value`` ``[KVH, R, D]`` at ``positions`` ``[R]``, in plain torch."""
        self.keys[request][layer].index_copy_(1, positions, key)
        self.values[request][layer].index_copy_(1, positions, value)

    def addresses(self, layer: int) -> Addresses:
        """For a kernel that works on ``layer``."""
        if not 0 <= layer < self.keys[0].shape[0]:
            raise InvalidInput("layer", layer, f"0 to {self.keys[0].shape[0] - 1}")
        return Addresses(self.keys[0], self.values[0], self._table, layer)

    @cached_property
    def _table(self) -> Tensor:
        for tensor in (*self.keys, *self.values):
            check_rows("canvas", tensor, dense=True)
        size = self.dtype.itemsize
        origins = self.keys[0].data_ptr(), self.values[0].data_ptr()
        rows = [
            [(k.data_ptr() - origins[0]) // size, (v.data_ptr() - origins[1]) // size, k.stride(0), k.stride(1)]
            for k, v in zip(self.keys, self.values, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self.device)


class Pages(Memory):
    """Keys and values in blocks of P tokens that B requests share.

    Args:
        keys, values: for each layer ``[blocks, P, KVH, D]``, a view in that order of whatever layout the blocks have;
            D numbers lie side by side, and all have the same strides.
        block_table: ``[B, M]`` int32 or int64; entry m names the block with positions ``m * P`` to
            ``m * P + P - 1`` of a request.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], block_table: Tensor) -> None:
        if not keys or len(keys) != len(values):
            raise InvalidInput("pages", (len(keys), len(values)), "as many keys as values, one or more layers")
        first = keys[0]
        for tensor in (*keys, *values):
            like = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if tensor.ndim != 4 or like != (first.shape, first.stride(), first.dtype, first.device):
                raise InvalidInput("pages", (tuple(tensor.shape), tensor.stride()), "[blocks, P, KVH, D], all alike")
            check_rows("pages", tensor, dense=False)
        if block_table.ndim != 2 or block_table.dtype not in (torch.int32, torch.int64) or not len(block_table):
            raise InvalidInput("block_table", (tuple(block_table.shape), block_table.dtype), "[B, M] int32 or int64")
        self.keys = tuple(keys)
        self.values = tuple(values)
        self.block_table = block_table.to(first.device, torch.int32).contiguous()

    @property
    def requests(self) -> int:
        """B."""
        return self.block_table.shape[0]

    @property
    def kv_heads(self) -> int:
        """KVH."""
        return self.keys[0].shape[2]

    def capacity(self, request: int) -> int:
        """How many positions a request's block table holds; the same for all."""
        del request
        return self.block_table.shape[1] * self.keys[0].shape[1]

    def views(self, request: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[KVH, length, D]`` of a request's first positions: copies."""
        block, offset = self._find(request, torch.arange(length, device=self.device))
        return self.keys[layer][block, offset].transpose(0, 1), self.values[layer][block, offset].transpose(0, 1)

    def write(self, request: int, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Put ``key`` and ``value`` ``[KVH, R, D]`` at ``positions`` ``[R]``, in plain torch."""
        at = self._find(request, positions)
        self.keys[layer][at] = key.transpose(0, 1)
        self.values[layer][at] = value.transpose(0, 1)

    def addresses(self, layer: int) -> Addresses:
        """For a kernel that works on ``layer``."""
        if not 0 <= layer < len(self.keys):
            raise InvalidInput("layer", layer, f"0 to {len(self.keys) - 1}")
        key = self.keys[layer]
        block, token, head, _ = key.stride()
        return Addresses(key, self.values[layer], self.block_table, 0, block, token, head, key.shape[1])

    def _find(self, request: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Block and place in it of each position."""
        page = self.keys[0].shape[1]
        return self.block_table[request].long()[positions // page], positions % page


def _kind(canvas: Tensor) -> tuple[object, ...]:
    """All that canvases of one batch have in common."""
    return (*canvas.shape[:2], *canvas.shape[3:], canvas.dtype, canvas.device)


def check_rows(name: str, tensor: Tensor, *, dense: bool) -> None:
    """Refuse a tensor ``[..., D]`` whose rows of D numbers a kernel cannot read 16 bytes at a time.

    With ``dense``, rows must also follow each other without a gap in the dimension before the last.
    """
    size = tensor.element_size()
    dims = tensor.shape[-1]
    if tensor.stride(-1) != 1 or (dense and tensor.shape[-2] > 1 and tensor.stride(-2) != dims):
        raise InvalidInput(f"{name}.strides", tensor.stride(), f"rows of {dims} numbers side by side")
    steps = [step for step, count in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if count > 1]
    if any(step * size % ALIGNMENT for step in (*steps, dims)) or tensor.data_ptr() % ALIGNMENT:
        raise InvalidInput(
            f"{name}.strides", (tensor.stride(), tensor.dtype), f"rows that start at multiples of {ALIGNMENT} bytes"
        )

"""What the wrappers of the Triton kernels check before a launch, and the arguments that they work out alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.memory import ALIGNMENT, Memory

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
_LARGEST_OFFSET = 2**31
"""Positions of one head are told apart in 32 bits; heads, layers and requests in 64."""


def padded(dims: int) -> int:
    """The power of two, 16 or more, that holds ``dims``: what a block of a kernel may measure."""
    return max(16, 1 << (dims - 1).bit_length())


def check_numbers(name: str, tensor: Tensor, ndim: int) -> None:
    """Refuse a tensor that is not ``ndim``-dimensional, of a head dimension and a dtype that the kernels take."""
    dims = tensor.shape[-1] if tensor.ndim else 0
    if tensor.ndim != ndim or not 8 <= dims <= LARGEST_HEAD or dims % 8:
        raise InvalidInput(
            name, tuple(tensor.shape), f"{ndim} dimensions, the last a multiple of 8 up to {LARGEST_HEAD}"
        )
    if tensor.dtype not in DTYPES:
        raise InvalidInput(f"{name}.dtype", tensor.dtype, ", ".join(map(str, DTYPES)))


def check_like(name: str, tensor: Tensor, like: Tensor, *dims: int) -> None:
    """Refuse a tensor that differs from ``like`` in dtype, device, or one of ``dims``."""
    wanted = (like.ndim, like.dtype, like.device, *(like.shape[dim] for dim in dims))
    if (
        tensor.ndim != like.ndim
        or (tensor.ndim, tensor.dtype, tensor.device, *(tensor.shape[d] for d in dims)) != wanted
    ):
        raise InvalidInput(name, (tuple(tensor.shape), tensor.dtype, tensor.device), f"dimensions and kind as {wanted}")


def check_positions(name: str, positions: Tensor, count: int, device: torch.device) -> None:
    """Refuse what is no vector of ``count`` int64 on ``device``."""
    if (tuple(positions.shape), positions.dtype, positions.device) != ((count,), torch.int64, device):
        raise InvalidInput(name, (tuple(positions.shape), positions.dtype), f"[{count}] int64 on {device}")


def check_window(window: int | None) -> None:
    """Refuse a window that shows nothing."""
    if window is not None and window < 1:
        raise InvalidInput("window", window, "1 or more, or none")


def check_memory(name: str, tensor: Tensor, memory: Memory, batch: Batch) -> None:
    """Refuse rows ``[heads, R, D]`` that are not this batch's, or a memory that is not for them."""
    check_numbers(name, tensor, 3)
    wanted = (batch.rows, memory.head_dim, memory.dtype, memory.device)
    if (tensor.shape[1], tensor.shape[2], tensor.dtype, tensor.device) != wanted:
        raise InvalidInput(name, (tuple(tensor.shape), tensor.dtype), f"rows, D, dtype and device {wanted}")
    batch.check(memory)
    for request in range(memory.requests):
        if memory.capacity(request) * memory.head_dim >= _LARGEST_OFFSET:
            raise InvalidInput("memory", memory.capacity(request), f"N × D below {_LARGEST_OFFSET}")


def check_attend(query: Tensor, memory: Memory, batch: Batch, window: int | None) -> int:
    """Check the arguments of ``attend``; returns how many heads share one KV head."""
    check_memory("query", query, memory, batch)
    check_window(window)
    return check_group(query, memory.kv_heads)


def check_group(query: Tensor, kv_heads: int) -> int:
    """How many of the query's heads share one of ``kv_heads``."""
    if not query.shape[0] or query.shape[0] % kv_heads:
        raise InvalidInput("query", tuple(query.shape), f"heads in multiples of the {kv_heads} KV heads")
    return query.shape[0] // kv_heads


def scaling(scale: float, softcap: float | None) -> tuple[float, float]:
    """``inner`` and ``outer`` of :func:`~blend.recompute.kernels.device.bend`, for scores in powers of two."""
    if softcap is None:
        return scale * math.log2(math.e), 1.0
    if not softcap > 0:
        raise InvalidInput("softcap", softcap, "above 0, or none")
    return 2 * math.log2(math.e) * scale / softcap, softcap * math.log2(math.e)


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` ``[..., D]``, copied if its rows do not start at multiples of 16 bytes or are strided."""
    size = tensor.element_size()
    steps = [step * size for step, count in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if count > 1]
    bad = tensor.stride(-1) != 1 or tensor.data_ptr() % ALIGNMENT or any(step % ALIGNMENT for step in steps)
    return tensor.contiguous() if bad else tensor


def both(numbers: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """One tensor, or keys and values, as a tuple."""
    return (numbers,) if isinstance(numbers, Tensor) else numbers

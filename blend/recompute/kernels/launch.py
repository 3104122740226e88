"""Launching Triton kernels, or collecting the launches instead.

A collected launch holds all that a compiler needs, so that whatever the wrappers would launch can be built for any
GPU on a machine that has none, without a second list of configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: the kernel, its grid, its arguments, and what is constant when it is compiled.

    ``constants`` holds compile-time parameters, ``num_warps`` and ``num_stages``.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_collected: ContextVar[tuple[list[Launch], int] | None] = ContextVar("blend_collected_launches", default=None)


@contextmanager
def collected(architecture: int = 90) -> Iterator[list[Launch]]:
    """Within it kernels are not run; their launches for that architecture are appended to the list that it gives."""
    launches: list[Launch] = []
    token = _collected.set((launches, architecture))
    try:
        yield launches
    finally:
        _collected.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` on the device of its first argument, a tensor; nothing happens on an empty grid."""
    if 0 in grid:
        return
    collecting = _collected.get()
    if collecting is not None:
        collecting[0].append(Launch(kernel, grid, arguments, constants))
        return
    first: Tensor = arguments[0]
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[grid](*arguments, **constants)


def architecture(device: torch.device) -> int:
    """What kernels are launched for: a GPU's compute capability, such as 90; 80, the least, where there is none."""
    collecting = _collected.get()
    if collecting is not None:
        return collecting[1]
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

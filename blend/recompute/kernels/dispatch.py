"""Which version of the kernels runs: chosen once, for a device."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute import attention
from blend.recompute.kernels import reference
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.memory import Memory
from blend.recompute.kernels.stored import Stored, Turns

Backend = Literal["triton", "torch", "reference"]


class Assemble(Protocol):
    """:func:`blend.recompute.kernels.reference.assemble`."""

    def __call__(
        self, stored: Stored, layer: int, key: Tensor, value: Tensor, slots: Tensor, turns: Turns | None
    ) -> None: ...


class Attend(Protocol):
    """:func:`blend.recompute.kernels.reference.attend`."""

    def __call__(
        self,
        query: Tensor,
        memory: Memory,
        layer: int,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


class Commit(Protocol):
    """:func:`blend.recompute.kernels.reference.commit`."""

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        memory: Memory,
        layer: int,
        batch: Batch,
        *,
        score: Literal["key", "value", "both"] | None = None,
    ) -> Tensor | None: ...


class Deviation(Protocol):
    """:func:`blend.recompute.kernels.reference.deviation`."""

    def __call__(
        self,
        fresh: Tensor | tuple[Tensor, Tensor],
        cached: Tensor | tuple[Tensor, Tensor],
        positions: Tensor | None = None,
    ) -> Tensor: ...


class Mass(Protocol):
    """:func:`blend.recompute.kernels.reference.mass`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        positions: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        visible: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """One version of each kernel. All versions take the same arguments and mean the same."""

    backend: Backend
    assemble: Assemble
    attend: Attend
    commit: Commit
    deviation: Deviation
    mass: Mass


@cache
def kernels(device: torch.device, backend: Backend | None = None) -> Kernels:
    """The kernels for ``device``; by default ``triton`` on CUDA where Triton is installed, else ``torch``.

    Triton is imported here and nowhere else, and only for its own version. ``torch`` is the reference but for
    attention, which is that of :mod:`blend.recompute.attention`.

    Raises:
        InvalidInput: ``backend`` is none of these, or Triton is asked for and not installed.
    """
    present = importlib.util.find_spec("triton") is not None
    if backend is None:
        backend = "triton" if device.type == "cuda" and present else "torch"
    if backend == "triton" and present:
        return _triton()
    if backend not in ("torch", "reference"):
        raise InvalidInput("backend", backend, "triton (where it is installed), torch, or reference")
    attend = reference.attend if backend == "reference" else _attend
    return Kernels(backend, reference.assemble, attend, reference.commit, reference.deviation, reference.mass)


def _triton() -> Kernels:
    from blend.recompute.kernels.assemble import assemble
    from blend.recompute.kernels.attend import attend
    from blend.recompute.kernels.commit import commit
    from blend.recompute.kernels.deviation import deviation
    from blend.recompute.kernels.mass import mass

    return Kernels("triton", assemble, attend, commit, deviation, mass)


def _attend(
    query: Tensor,
    memory: Memory,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See :func:`blend.recompute.kernels.reference.attend`; one request after another."""
    parts = []
    for request, positions in enumerate(batch.positions):
        rows = query[:, batch.starts[request] : batch.starts[request + 1]]
        key, value = memory.views(request, layer, batch.length(request))
        visible = batch.visible[request]
        if visible is not None:
            visible = visible[: batch.length(request)]
        parts.append(
            attention.attend(rows, key, value, positions, scale=scale, window=window, softcap=softcap, visible=visible)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

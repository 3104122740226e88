"""Which version of the kernels runs: chosen once, for a device."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute import attention
from blend.recompute import mass as masses
from blend.recompute.kernels import fit, reference
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.checks import check_numbers
from blend.recompute.kernels.memory import Memory
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Stored, Turns

_log = logging.getLogger(__name__)

Backend = Literal["triton", "torch", "reference"]
Choice = Literal["auto", "triton", "torch", "reference"]


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


class Move(Protocol):
    """:func:`blend.recompute.kernels.reference.move`."""

    def __call__(self, key: Tensor, mean: Tensor, spans: Spans, turns: Turns | None) -> None: ...


class AttendWithMass(Protocol):
    """:func:`blend.recompute.mass.attend_with_mass`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        counted: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Kernels:
    """One version of each kernel. All versions take the same arguments and mean the same.

    ``attend_with_mass`` is there where both together cost less than one after the other.
    """

    backend: Backend
    assemble: Assemble
    attend: Attend
    commit: Commit
    deviation: Deviation
    mass: Mass
    move: Move
    attend_with_mass: AttendWithMass | None = None


@cache
def kernels(device: torch.device, backend: Backend | None = None) -> Kernels:
    """The kernels for ``device``; by default ``triton`` on a CUDA device that it fits, else ``torch``.

    Why a CUDA device gets ``torch`` by default is logged. Triton is imported here and nowhere else, and only for its
    own version. ``torch`` is the reference but for attention and its mass, which are those of
    :mod:`blend.recompute.attention` and :mod:`blend.recompute.mass`.

    Raises:
        InvalidInput: ``backend`` is none of these, or Triton is asked for and not installed.
    """
    present = importlib.util.find_spec("triton") is not None
    if backend is None:
        backend = "torch"
        if device.type == "cuda":
            against = fit.unfit(*_gpu(device)) if present else "it is not installed"
            backend = "torch" if _passed_over(against) else "triton"
    if backend == "triton" and present:
        return _triton()
    if backend not in ("torch", "reference"):
        raise InvalidInput("backend", backend, "triton (where it is installed), torch, or reference")
    own = backend == "torch"
    attend, mass = (_attend, masses.mass) if own else (reference.attend, reference.mass)
    both = masses.attend_with_mass if own and device.type == "cpu" else None
    return Kernels(
        backend, reference.assemble, attend, reference.commit, reference.deviation, mass, reference.move, both
    )


def kernels_for(canvas: Tensor, choice: Choice = "auto") -> Kernels:
    """The kernels for all canvases ``[L, KVH, N, D]`` of this one's device, dtype and head dimension.

    ``auto`` is the default of :func:`kernels`, but ``torch`` for heads that Triton's version does not take.

    Raises:
        InvalidInput: no such choice; or Triton by name where it is not installed, where nothing can run it, or for
            heads that it does not take.
    """
    found = kernels(canvas.device, None if choice == "auto" else choice)
    if found.backend != "triton":
        return found
    if canvas.device.type != "cuda" and not _interpreted():
        allowed = "auto, torch or reference; triton needs a CUDA device, or its interpreter (TRITON_INTERPRET=1)"
        raise InvalidInput("kernels", f"triton on {canvas.device}", allowed)
    try:
        check_numbers("canvas", canvas, 4)
    except InvalidInput as error:
        if choice == "auto" and _passed_over(str(error)):
            return kernels(canvas.device, "torch")
        raise
    return found


def _passed_over(reason: str) -> bool:
    """Whether there is a reason not to run Triton's version by default; logs it."""
    if reason:
        _log.warning("the kernels run on torch, not on Triton: %s", reason)
    return bool(reason)


def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    """A GPU's compute capability, and the bytes of shared memory that a block may have there."""
    properties: Any = torch.cuda.get_device_properties(device)
    # torch names what a kernel may ask for on NVIDIA's devices only.
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return (properties.major, properties.minor), shared


def _interpreted() -> bool:
    from blend.recompute.kernels.device import INTERPRETED

    return bool(INTERPRETED.value)


def _triton() -> Kernels:
    from blend.recompute.kernels.assemble import assemble
    from blend.recompute.kernels.attend import attend
    from blend.recompute.kernels.commit import commit
    from blend.recompute.kernels.deviation import deviation
    from blend.recompute.kernels.mass import mass
    from blend.recompute.kernels.move import move

    return Kernels("triton", assemble, attend, commit, deviation, mass, move)


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
    for request in range(len(batch.positions)):
        rows = query[:, batch.starts[request] : batch.starts[request + 1]]
        key, value = memory.views(request, layer, batch.length(request))
        reach = batch.reach(request, window)
        parts.append(attention.attend(rows, key, value, reach, scale=scale, softcap=softcap).transpose(0, 1))
    # Rows first in memory, also where there are several requests.
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)

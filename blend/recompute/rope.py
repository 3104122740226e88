"""Turning stored keys to another position. Pure tensors: nothing of models is imported here.

Rotary embedding turns the pairs of a key by ``position x frequency`` (Su et al., "RoFormer", 2021). Turns add up,
so a key computed at one position becomes the key of another by one more turn, ``shift x frequency``. A scale that
the model puts on its cosines and sines (YaRN's attention factor) is in the stored key already: the turn here has
unit magnitude.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blend.errors import InvalidInput

Pairing = Literal["half", "interleaved"]


class Rotation:
    """How the keys of one rotary group turn by a shift.

    Args:
        inverse_frequencies: ``[P]``, radians a position for each of the P pairs, as the model has them.
        pairing: ``half`` pairs dimension i with i + P, ``interleaved`` pairs 2i with 2i + 1. Dimensions from 2P on
            (partial rotary) stay as they are.
    """

    __slots__ = ("inverse_frequencies", "pairing")

    inverse_frequencies: Tensor
    pairing: Pairing

    def __init__(self, inverse_frequencies: Tensor, pairing: Pairing) -> None:
        if inverse_frequencies.ndim != 1 or not len(inverse_frequencies):
            raise InvalidInput("inverse_frequencies", tuple(inverse_frequencies.shape), "a vector of one or more")
        if pairing not in ("half", "interleaved"):
            raise InvalidInput("pairing", pairing, "half or interleaved")
        with torch.inference_mode(False):
            self.inverse_frequencies = inverse_frequencies.detach().to(torch.float32, copy=True)
        self.pairing = pairing

    @property
    def dims(self) -> int:
        """The number of dimensions that turn, from 0 on: 2P."""
        return 2 * len(self.inverse_frequencies)

    def by(self, shift: int) -> Turn:
        """Return the turn by ``shift`` positions, negative ones included."""
        # The angle itself in float64: float32 would lose 1e-3 radians at a shift of 16K.
        angle = self.inverse_frequencies.double() * shift
        return Turn(self, angle.cos().float(), angle.sin().float())

    def at(self, shifts: Tensor) -> Turn:
        """Return the turn that takes each of T tokens by its own one of ``shifts``, ``[T]`` int64."""
        angle = shifts.double()[:, None] * self.inverse_frequencies.to(shifts.device).double()
        return Turn(self, angle.cos().float(), angle.sin().float())

    def rotate(self, keys: Tensor, shift: int) -> Tensor:
        """``keys`` ``[..., T, D]`` as if computed ``shift`` positions later (earlier, if negative).

        Computed in float32 and cast once to the dtype of ``keys``. A new tensor; for shift 0, ``keys`` itself.
        """
        if shift == 0:
            return keys
        turned = torch.empty_like(keys, memory_format=torch.contiguous_format)
        self.by(shift).into(keys, turned)
        return turned

    def same_turn(self, other: Rotation) -> bool:
        """Whether both turn every key alike."""
        return self.pairing == other.pairing and torch.equal(self.inverse_frequencies, other.inverse_frequencies)

    def __repr__(self) -> str:
        return f"Rotation(dims={self.dims}, pairing={self.pairing})"

    def pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Both members of every pair of ``keys`` ``[..., D]``, ``[..., P]`` each, as views."""
        if self.pairing == "interleaved":
            return keys[..., 0 : self.dims : 2], keys[..., 1 : self.dims : 2]
        return keys[..., : self.dims // 2], keys[..., self.dims // 2 : self.dims]


class Turn:
    """Shifts of one rotary group, their angles worked out.

    Args:
        rotation: how keys turn.
        cos, sin: ``[P]`` float32, of the angle of each pair; ``[T, P]`` where each token has a shift of its own.

    Attributes:
        cos, sin: the same, on the device that was last worked on.
    """

    __slots__ = ("_rotation", "cos", "sin")

    def __init__(self, rotation: Rotation, cos: Tensor, sin: Tensor) -> None:
        self._rotation = rotation
        self.cos = cos
        self.sin = sin

    @property
    def table(self) -> npt.NDArray[np.float32]:
        """``[2, P]`` or ``[2, T, P]`` float32: cosines and sines in host memory."""
        table: npt.NDArray[np.float32] = torch.stack((self.cos, self.sin)).cpu().numpy()
        return table

    def into(self, keys: Tensor, out: Tensor) -> None:
        """Write ``keys`` ``[..., T, D]``, turned, to ``out`` of the same shape and dtype; the two must not overlap.

        Computed in float32 and cast once. Dimensions that do not turn are copied.

        Raises:
            InvalidInput: fewer dimensions than turn.
        """
        dims = self._rotation.dims
        if keys.shape[-1] < dims:
            raise InvalidInput("keys", tuple(keys.shape), f"a last dimension of {dims} or more")
        if self.cos.device != keys.device:
            self.cos, self.sin = self.cos.to(keys.device), self.sin.to(keys.device)
        if dims < keys.shape[-1]:
            out[..., dims:].copy_(keys[..., dims:])
        (x, y), (out_x, out_y) = self._rotation.pairs(keys), self._rotation.pairs(out)
        x, y = x.float(), y.float()
        if keys.dtype == torch.float32:
            torch.mul(x, self.cos, out=out_x).addcmul_(y, self.sin, value=-1)
            torch.mul(y, self.cos, out=out_y).addcmul_(x, self.sin)
        else:
            out_x.copy_((x * self.cos).addcmul_(y, self.sin, value=-1))
            out_y.copy_((y * self.cos).addcmul_(x, self.sin))

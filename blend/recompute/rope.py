"""Turning stored keys to another position. Pure tensors: nothing of models is imported here.

Rotary embedding turns the pairs of a key by ``position x frequency`` (Su et al., "RoFormer", 2021). Turns add up,
so a key computed at one position becomes the key of another by one more turn, ``shift x frequency``. A scale that
the model puts on its cosines and sines (YaRN's attention factor) is in the stored key already: the turn here has
unit magnitude.
"""

from __future__ import annotations

from typing import Literal

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

    def rotate(self, keys: Tensor, shift: int) -> Tensor:
        """``keys`` ``[..., T, D]`` as if computed ``shift`` positions later (earlier, if negative).

        Computed in float32 and cast once to the dtype of ``keys``. A new tensor; for shift 0, ``keys`` itself.
        """
        if keys.shape[-1] < self.dims:
            raise InvalidInput("keys", tuple(keys.shape), f"a last dimension of {self.dims} or more")
        if shift == 0:
            return keys
        # The angle itself in float64: float32 would lose 1e-3 radians at a shift of 16K.
        angle = self.inverse_frequencies.to(keys.device, torch.float64) * shift
        cos, sin = angle.cos().float(), angle.sin().float()
        turned = torch.empty_like(keys, memory_format=torch.contiguous_format)
        turned[..., self.dims :] = keys[..., self.dims :]
        (x, y), (out_x, out_y) = self._pairs(keys), self._pairs(turned)
        x, y = x.float(), y.float()
        if keys.dtype == torch.float32:
            torch.mul(x, cos, out=out_x).addcmul_(y, sin, value=-1)
            torch.mul(y, cos, out=out_y).addcmul_(x, sin)
        else:
            out_x.copy_((x * cos).addcmul_(y, sin, value=-1))
            out_y.copy_((y * cos).addcmul_(x, sin))
        return turned

    def same_turn(self, other: Rotation) -> bool:
        """Whether both turn every key alike."""
        return self.pairing == other.pairing and torch.equal(self.inverse_frequencies, other.inverse_frequencies)

    def __repr__(self) -> str:
        return f"Rotation(dims={self.dims}, pairing={self.pairing})"

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Both members of every pair, ``[..., P]`` each, as views."""
        if self.pairing == "interleaved":
            return keys[..., 0 : self.dims : 2], keys[..., 1 : self.dims : 2]
        return keys[..., : self.dims // 2], keys[..., self.dims // 2 : self.dims]

"""What a forward pass works on, and who may watch it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.canvas import Canvas


@dataclass(frozen=True)
class LayerAttention:
    """What one layer asks of attention: see :func:`blend.recompute.kernels.reference.attend`."""

    scale: float
    window: int | None
    softcap: float | None


class StopForward(Exception):
    """Raised by an observer that has seen enough: ends the whole pass, which then returns ``None``."""


class Observer:
    """Sees one request's rows in every layer, in order. Tensors are views: copy what shall outlive the call.

    ``query`` is ``[H, R, D]``, ``key`` and ``value`` are ``[KVH, R, D]``, both turned to their positions.
    """

    def before_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """The canvas still holds what it held at the rows' positions before the pass."""

    def after_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> Tensor | None:
        """The canvas holds the fresh K and V; attention is computed next.

        Returns the rows' attention ``[H, R, D]`` in the dtype of ``query`` where the observer came by it anyway; a pass
        over this request alone then computes none. ``None`` leaves it to the pass.
        """
        return None

    def after_attention(self, layer: int, rows: Rows) -> int:
        """Attention is computed. What the layer's canvas holds may be changed for later rows now.

        Returns how many of the last rows are to be among these: their attention is computed once more.
        """
        return 0


@dataclass
class Rows:
    """Rows of one request in one forward pass.

    ``positions`` and ``token_ids`` are checked on the host: what is there already, as in decoding, is not brought back.

    Args:
        canvas: of the request. The pass writes K and V at ``positions``, in every layer it reaches.
        positions: ``[R]`` int64, strictly ascending, within the canvas.
        token_ids: ``[R]`` int64, the token of each row.
        visible: ``[N]`` bool, keys that these rows may read besides their own; ``None``: all up to their position.
        observer: called in every layer.

    Attributes:
        at: ``positions`` in the host's memory.

    Raises:
        InvalidInput: shapes that do not fit together, or positions that do not ascend within the canvas.
    """

    canvas: Canvas
    positions: Tensor
    token_ids: Tensor
    visible: Tensor | None = None
    observer: Observer | None = None
    at: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape, length = tuple(self.positions.shape), self.canvas.length
        if len(shape) != 1 or not shape[0]:
            raise InvalidInput("positions", shape, "a vector of one or more positions")
        if self.token_ids.shape != self.positions.shape:
            raise InvalidInput("token_ids", tuple(self.token_ids.shape), f"one token a row, {shape}")
        for name, kind in (("positions", self.positions.dtype), ("token_ids", self.token_ids.dtype)):
            if kind != torch.int64:
                raise InvalidInput(name, kind, "int64")
        if self.visible is not None and (self.visible.shape != (length,) or self.visible.dtype != torch.bool):
            raise InvalidInput("visible", tuple(self.visible.shape), f"a bool for each of {length} positions")
        self.at = self.positions.cpu()
        at = self.at.numpy()
        if at[0] < 0 or at[-1] >= length or (at[1:] <= at[:-1]).any():
            raise InvalidInput("positions", (int(at[0]), int(at[-1])), f"strictly ascending from 0 to {length - 1}")

    def __len__(self) -> int:
        return len(self.positions)

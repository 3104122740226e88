"""Where keys or values of a canvas are moved, for the kernel that moves them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 32
"""Positions of one program."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans of a canvas whose keys or values are moved, each by a vector of its own.

    Args:
        bounds: ``(start, end)`` of each of C spans, ascending.
        moved: ``[N]`` float32, 1 where they are and 0 elsewhere; the canvas may be longer, and spans end within both.
    """

    bounds: tuple[tuple[int, int], ...]
    moved: Tensor

    def __len__(self) -> int:
        return len(self.bounds)

    @cached_property
    def tiles(self) -> Tensor:
        """``[tiles, 3]`` int32: span, first position and end of each program."""
        rows = [
            (span, at, min(at + TILE, end))
            for span, (start, end) in enumerate(self.bounds)
            for at in range(start, end, TILE)
        ]
        return torch.tensor(rows, dtype=torch.int32).view(-1, 3).to(self.moved.device)

"""The rows of a pass: whose they are, where they stand, and how attention over them is cut into pieces of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.attention import Reach
from blend.recompute.kernels.memory import Memory

WAVES = 2
"""Pieces of work for each processor that attention aims at, so that none waits long for the last one."""

SHORTEST_PART = 512
"""Keys below which splitting a row's keys costs more than it brings."""


@dataclass(frozen=True, eq=False)
class Work:
    """Attention of a batch in pieces. A piece is up to ``BLOCK_M`` (row, head of group) pairs over a range of keys.

    Attributes:
        pieces: ``[W, 8]`` int32: request; first and last pair (exclusive), counted from the request's first row as
            ``row * group + head``; first and last key (exclusive); the part of these, in whole blocks of keys, that
            every row reads; where its partial result goes, -1: straight to the output. Longest first.
        merges: ``[X, 4]`` int32, for each tile whose keys are split: request, first pair, last pair, first partial.
        parts: ``[X]`` int32, how many partial results follow one another for each.
        partials: how many there are in all.
    """

    pieces: Tensor
    merges: Tensor
    parts: Tensor
    partials: int


class Batch:
    """Rows of B requests, side by side along the row axis; the same in every layer of a pass.

    Args:
        positions: for each request ``[R_i]`` int64, strictly ascending, one or more, on one device.
        visible: for each request ``[N_i]`` bool, keys that may be read besides a row's own, or ``None``: all.
        processors: how many pieces of work run at once. Keys are split only to keep that many busy.
        device: where the rows are computed; ``None``: where their positions are.
    """

    def __init__(
        self,
        positions: Sequence[Tensor],
        visible: Sequence[Tensor | None] | None = None,
        *,
        processors: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not positions:
            raise InvalidInput("positions", "none", "those of one or more requests")
        for at in positions:
            if at.ndim != 1 or not len(at) or at.dtype != torch.int64 or at.device != positions[0].device:
                raise InvalidInput("positions", (tuple(at.shape), at.dtype), "vectors of int64 on one device")
        if visible is not None and len(visible) != len(positions):
            raise InvalidInput("visible", len(visible), f"one for each of {len(positions)} requests")
        self.positions = tuple(at.to(device or at.device) for at in positions)
        self.visible: tuple[Tensor | None, ...] = (None,) * len(positions) if visible is None else tuple(visible)
        for mask in self.visible:
            if mask is not None and (mask.ndim != 1 or mask.dtype != torch.bool or mask.device != self.device):
                raise InvalidInput("visible", (tuple(mask.shape), mask.dtype), "vectors of bool on one device")
        self.starts = [0]
        for at in positions:
            self.starts.append(self.starts[-1] + len(at))
        # One copy to the host for all requests: everything below is planned there.
        flat = torch.cat(list(positions)).cpu().numpy()
        self._at = [flat[start:stop] for start, stop in pairwise(self.starts)]
        for own in self._at:
            if own[0] < 0 or (own[1:] <= own[:-1]).any():
                raise InvalidInput("positions", own.tolist(), "0 or more, strictly ascending")
        self.processors = _processors(self.device) if processors is None else processors
        self._work: dict[tuple[int, ...], Work] = {}
        self._reaches: dict[tuple[int, int | None], Reach] = {}

    @property
    def device(self) -> torch.device:
        """Of all positions."""
        return self.positions[0].device

    @property
    def rows(self) -> int:
        """R, of all requests together."""
        return self.starts[-1]

    def check(self, memory: Memory) -> None:
        """Refuse a memory that is not for these requests, or too short for their positions."""
        if memory.requests != len(self.positions) or memory.device != self.device:
            raise InvalidInput("memory", memory.requests, f"{len(self.positions)} requests on {self.device}")
        for request, own in enumerate(self._at):
            if own[-1] >= memory.capacity(request):
                raise InvalidInput(
                    "positions", int(own[-1]), f"below {memory.capacity(request)}, where request {request} ends"
                )
            mask = self.visible[request]
            if mask is not None and len(mask) <= own[-1]:
                raise InvalidInput("visible", len(mask), f"more than {own[-1]} entries")

    def length(self, request: int) -> int:
        """How many keys the request's last row reads: its position and those before it."""
        return int(self._at[request][-1]) + 1

    def reach(self, request: int, window: int | None) -> Reach:
        """Which keys each of a request's rows reads, for attention in plain torch. Kept for the next layer."""
        found = self._reaches.get((request, window))
        if found is None:
            found = Reach(self.positions[request], window, self.visible[request])
            self._reaches[request, window] = found
        return found

    @cached_property
    def row_positions(self) -> Tensor:
        """``[R]`` int32, the position of each row."""
        return torch.cat(self.positions).to(torch.int32)

    @cached_property
    def row_requests(self) -> Tensor:
        """``[R]`` int32, the request of each row."""
        counts = torch.tensor([len(own) for own in self._at])
        return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(self.device)

    @cached_property
    def row_starts(self) -> Tensor:
        """``[B]`` int32, the first row of each request."""
        return torch.tensor(self.starts[:-1], dtype=torch.int32).to(self.device)

    @cached_property
    def visibility(self) -> tuple[Tensor, Tensor] | None:
        """Masks of all requests as bytes, one after another, and where each begins, ``[B]`` int64; ``None``: none."""
        if all(mask is None for mask in self.visible):
            return None
        masks = [
            torch.ones(self.length(i), dtype=torch.bool, device=self.device) if mask is None else mask
            for i, mask in enumerate(self.visible)
        ]
        starts = torch.tensor([0, *(len(mask) for mask in masks[:-1])]).cumsum(0)
        return torch.cat(masks).view(torch.uint8), starts.to(self.device)

    def work(self, kv_heads: int, group: int, block_m: int, block_n: int, window: int | None) -> Work:
        """The pieces of attention for heads in ``kv_heads`` groups of ``group``. Kept for the next layer."""
        found = self._work.get((kv_heads, group, block_m, block_n, window or 0))
        if found is None:
            found = self._cut(kv_heads, group, block_m, block_n, window)
            self._work[kv_heads, group, block_m, block_n, window or 0] = found
        return found

    def _cut(self, kv_heads: int, group: int, block_m: int, block_n: int, window: int | None) -> Work:
        plain = all(mask is None for mask in self.visible)
        tiles = []
        for request, own in enumerate(self._at):
            for first in range(0, len(own) * group, block_m):
                last = min(first + block_m, len(own) * group)
                low, high = int(own[first // group]), int(own[(last - 1) // group]) + 1
                start = 0 if window is None else max(0, low - window + 1)
                # Every row reads from the last row's window on and up to the first row's position.
                common = 0 if window is None else max(0, high - window)
                if plain:
                    open_ = -(-common // block_n) * block_n, (low + 1) // block_n * block_n
                else:
                    open_ = 0, 0
                tiles.append((request, first, last, start // block_n * block_n, high, *open_))
        longest = sum(high - low for *_, low, high, _, _ in tiles) * kv_heads / (WAVES * self.processors)
        longest = max(SHORTEST_PART, block_n * round(longest / block_n))
        pieces, merges, parts, partials = [], [], [], 0
        for request, first, last, low, high, open_low, open_high in tiles:
            count = round((high - low) / longest) or 1
            step = -(-(high - low) // (count * block_n)) * block_n
            ranges = [(at, min(at + step, high)) for at in range(low, high, step)]
            slot = -1 if len(ranges) == 1 else partials
            if slot >= 0:
                merges.append((request, first, last, slot))
                parts.append(len(ranges))
                partials += len(ranges)
            for index, (start, stop) in enumerate(ranges):
                from_, to = max(start, open_low), min(stop // block_n * block_n, open_high)
                common_keys = (from_, to) if from_ < to else (start, start)
                pieces.append((request, first, last, start, stop, *common_keys, slot + index if slot >= 0 else -1))
        pieces.sort(key=lambda piece: piece[3] - piece[4])
        return Work(
            torch.tensor(pieces, dtype=torch.int32).to(self.device),
            torch.tensor(merges, dtype=torch.int32).view(-1, 4).to(self.device),
            torch.tensor(parts, dtype=torch.int32).to(self.device),
            partials,
        )


def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

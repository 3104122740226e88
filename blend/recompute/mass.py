"""Attention mass of rows over one request's keys, alone or with their attention. Pure tensors, as in ``attention``.

All is computed in float32, one KV head after another: the scores of all heads would not fit the cache.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from blend.recompute.attention import MASKED_ROWS, Reach

SCORED_BYTES = 64 * 2**20
"""Scores that are held at a time, so that long prompts do not take more memory."""


def mass_rows(group: int, length: int) -> int:
    """Rows that are scored at a time against ``length`` keys, for the ``group`` heads of one KV head."""
    return max(1, min(MASKED_ROWS, SCORED_BYTES // (4 * group * length)))


def mass(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """The attention mass that rows put on every key, summed over heads and rows.

    Arguments and result are those of :func:`blend.recompute.kernels.reference.mass`. Keys that no row of a block sees
    are not read, and where neither a window nor ``visible`` hides others, only the last ones are masked.
    """
    reach, length = Reach(positions, window, visible), key.shape[1]
    total = torch.zeros(length, dtype=torch.float32, device=query.device)
    for rows in _slices(0, len(reach.at), mass_rows(len(query) // len(key), length)):
        block = _Block(query, key, reach, rows, scale, softcap)
        for head in range(len(key)):
            total[block.keys] += block.shares(head).sum(0)
    return total


def attend_with_mass(
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
) -> tuple[Tensor, Tensor]:
    """Attention of all rows, and the :func:`mass` of those from row ``counted`` on, both from the same scores.

    That costs half of what the two cost by themselves. Rows that are not counted cost more than in
    :func:`blend.recompute.attention.attend`: there should be few of them.

    Args:
        query, key, positions, scale, window, softcap, visible: as for :func:`mass`.
        value: ``[KVH, N, D]``.
        counted: the first row whose mass is wanted.

    Returns:
        Attention ``[H, R, D]`` in the dtype of ``query``, rows first in memory, and mass ``[N]`` float32.
    """
    reach, length = Reach(positions, window, visible), key.shape[1]
    total = torch.zeros(length, dtype=torch.float32, device=query.device)
    heads, count, dims = query.shape
    out = query.new_empty(count, heads, dims).transpose(0, 1)
    group = heads // len(key)
    most = mass_rows(group, length)
    for rows in chain(_slices(0, counted, most), _slices(counted, count, most)):
        block = _Block(query, key, reach, rows, scale, softcap)
        for head in range(len(key)):
            shares = block.shares(head)
            if rows.start >= counted:
                total[block.keys] += shares.sum(0)
            part = shares @ value[head, block.keys].float()
            out[head * group : (head + 1) * group, rows] = part.view(group, -1, dims)
    return out, total


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


class _Block:
    """Neighbouring rows and the keys that they see.

    Attributes:
        keys: from the first to the last one that a row of the block sees.
    """

    __slots__ = ("_begin", "_hidden", "_key", "_query", "_softcap", "keys")

    def __init__(
        self, query: Tensor, key: Tensor, reach: Reach, rows: slice, scale: float, softcap: float | None
    ) -> None:
        first, end = reach.at[rows.start], reach.at[rows.stop - 1] + 1
        low = 0 if reach.window is None else max(0, first - reach.window + 1)
        begin = first + 1 if reach.window is None and reach.visible is None else low
        seen = reach.mask(rows.start, rows.stop, begin, end)
        self._begin, self._hidden = begin - low, None if seen is None else ~seen
        scaled = query[:, rows].float().mul(scale if softcap is None else scale / softcap)
        self._query = scaled.reshape(len(key), -1, query.shape[2])
        self._key, self._softcap = key, softcap
        self.keys = slice(low, end)

    def shares(self, head: int) -> Tensor:
        """What each row of the group's heads attends to: ``[G * rows, keys]``, for one KV head."""
        scores = self._query[head] @ self._key[head, self.keys].float().t()
        if self._softcap is not None:
            scores = scores.tanh_().mul_(self._softcap)
        if self._hidden is not None:
            by_head = scores.view(-1, len(self._hidden), scores.shape[1])
            by_head[..., self._begin :].masked_fill_(self._hidden, float("-inf"))
        return scores.softmax(-1)

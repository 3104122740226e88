"""Attention of rows at any positions over one request's keys. Pure tensors: nothing of models is imported here.

The heads that share a KV head are folded into the rows, ``[KVH, G*R, D]`` against ``[KVH, N, D]``, so that K and V
are never repeated. Rows go in blocks; a block's keys end at its last row's position and begin where its first
row's window does, so scattered rows cost little more than what they see.

On a CPU without 16-bit matrix units, where arithmetic is what costs, a block reads the keys that all of its rows see
without a mask, and the few behind them in smaller blocks under one; both are put together by their log-sum-exps. That
is done in float32, to which many 16-bit rows, and the keys that they read, are converted first. Where such units make
arithmetic cheap, the second pass would cost more than the masks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blend.errors import InvalidInput

BLOCK_ROWS = 192
"""Rows of one block: torch's CPU kernel takes its larger tiles from 192 on; more rows would see more keys in vain."""

MERGED_ROWS, MASKED_ROWS = 256, 64
"""Rows of a block whose two parts are merged, and of the blocks that its masked part goes in."""

CONVERTED_ROWS = 128
"""16-bit rows from which on converting them and their keys costs less than it saves."""

KEPT_BYTES = 64 * 2**20
"""Masks up to this size in all are kept from layer to layer: making them anew costs an eighth of attention."""


class Reach:
    """Which keys each row reads. The same for every layer of one window, so made once a pass.

    Args:
        positions: ``[R]`` int64, strictly ascending.
        window: a row at p reads keys above ``p - window``, which is how transformers counts; ``None``: from 0 on.
        visible: ``[N]`` bool, the keys that may be read besides a row's own; ``None``: all.
    """

    __slots__ = ("_kept", "at", "blocks", "causal", "positions", "visible", "window")

    def __init__(self, positions: Tensor, window: int | None = None, visible: Tensor | None = None) -> None:
        if positions.ndim != 1 or not len(positions):
            raise InvalidInput("positions", tuple(positions.shape), "a vector of one or more positions")
        if window is not None and window < 1:
            raise InvalidInput("window", window, "1 or more, or none")
        at: list[int] = positions.tolist()
        self.at = at
        if window is not None and window > at[-1]:
            window = None  # reaches back to the first key from every row
        self.positions = positions
        self.window = window
        self.visible = visible
        self.causal = window is None and visible is None and at[-1] == len(at) - 1
        self.blocks: list[tuple[int, int, int, int]] = []
        """Start and stop of its rows, start and stop of its keys, for each block."""
        for start in range(0, len(at), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(at))
            low = 0 if window is None else max(0, at[start] - window + 1)
            self.blocks.append((start, stop, low, at[stop - 1] + 1))
        self._kept: dict[tuple[int, int, int, int, torch.dtype], Tensor] = {}

    def bias(self, block: int, group: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores: ``[group * rows, keys]``, 0 where a row reads a key and else minus infinity.

        The block's rows once for each of the ``group`` heads of a KV head; ``None`` where every row reads every key.
        """
        return self._bias(*self.blocks[block], group, dtype)

    def merged_bias(self, start: int, stop: int, low: int, group: int) -> Tensor | None:
        """:meth:`bias` in float32 for the rows from ``start`` to ``stop``, over keys from ``low`` to the last one's."""
        return self._bias(start, stop, low, self.at[stop - 1] + 1, group, torch.float32)

    def _bias(self, start: int, stop: int, low: int, high: int, group: int, dtype: torch.dtype) -> Tensor | None:
        name = start, stop, low, group, dtype
        if name in self._kept:
            return self._kept[name]
        mask = self.mask(start, stop, low, high)
        if mask is None:
            return None
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        bias = bias.repeat(group, 1)
        size = sum((stop - start) * (high - low) for start, stop, low, high in self.blocks)
        if size * group * dtype.itemsize <= KEPT_BYTES:
            self._kept[name] = bias
        return bias

    def merges(self, query: Tensor) -> bool:
        """Whether these rows' attention is made of a part without masks and one with them."""
        if self.window is not None or self.visible is not None or self.causal or query.device.type != "cpu":
            return False
        if query.dtype == torch.float32:
            return len(self.at) > 1
        return len(self.at) >= CONVERTED_ROWS and not matrix_units()

    def mask(self, start: int, stop: int, low: int, high: int) -> Tensor | None:
        """``[stop - start, high - low]`` bool, True where a row reads a key; ``None`` where all do."""
        if stop - start == 1 and self.visible is None:
            return None
        own = self.positions[start:stop, None]
        keys = torch.arange(low, high, device=own.device)
        mask = keys <= own
        if self.window is not None:
            mask &= keys > own - self.window
        if self.visible is not None:
            mask &= self.visible[low:high] | (keys == own)
        return mask


@cache
def matrix_units() -> bool:
    """Whether this CPU multiplies 16-bit matrices by instructions made for whole tiles of them."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def attend(
    query: Tensor, key: Tensor, value: Tensor, reach: Reach, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Each row's attention over keys up to and including its own position: ``[H, R, D]`` in the dtype of ``query``.

    Rows come first in memory, as the layer's output projection reads them. Nothing at a position that a row
    may not read changes a bit of its output, as long as it is finite.

    Args:
        query: ``[H, R, D]``; H is a multiple of KVH, heads of one KV head lie side by side.
        key, value: ``[KVH, N, D]``, already holding the rows' own keys and values.
        reach: which keys each row reads, all of them below N.
        scale: what scores are multiplied by.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    """
    heads, rows, dims = query.shape
    kv_heads = key.shape[0]
    if heads % kv_heads:
        raise InvalidInput("query", tuple(query.shape), f"heads in multiples of the {kv_heads} KV heads")
    if rows != len(reach.positions):
        raise InvalidInput("query", tuple(query.shape), f"one row for each of the {len(reach.positions)} positions")
    if reach.causal and softcap is None:
        return scaled_dot_product_attention(
            query[None], key[None, :, :rows], value[None, :, :rows], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    if softcap is None and reach.merges(query):
        key, value = key[:, : reach.at[-1] + 1], value[:, : reach.at[-1] + 1]
        return _merged(query.float(), key.float(), value.float(), reach, scale).to(query.dtype)
    out = query.new_empty(rows, heads, dims).transpose(0, 1)
    group = heads // kv_heads
    precision = query.dtype if softcap is None else torch.float32
    for block, (start, stop, low, high) in enumerate(reach.blocks):
        bias = reach.bias(block, group, precision)
        folded = query[:, start:stop].reshape(kv_heads, group * (stop - start), dims)
        part = _block(folded, key[:, low:high], value[:, low:high], bias, scale, softcap)
        out[:, start:stop] = part.view(heads, stop - start, dims)
    return out


def _block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """``query`` ``[KVH, Q, D]`` over ``[KVH, N, D]``, with one ``bias`` ``[Q, N]`` on the scores."""
    if softcap is None:
        return scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=bias, scale=scale)[0]
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    return torch.matmul(scores.softmax(-1), value.float()).to(query.dtype)


def _merged(query: Tensor, key: Tensor, value: Tensor, reach: Reach, scale: float) -> Tensor:
    """Attention of rows without windows or hidden keys: what all rows of a block see, merged with what only some do."""
    heads, rows, dims = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    # torch's kernel, called by itself, takes D numbers for neighbours and does not look.
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    out = query.new_empty(rows, heads, dims).transpose(0, 1)
    for first in range(0, rows, MERGED_ROWS):
        end = min(first + MERGED_ROWS, rows)
        shared = reach.at[first]  # every row of the block sees the keys below its first row's position
        before, before_lse = _with_lse(query[:, first:end], key[:, :shared], value[:, :shared], None, scale)
        for start in range(first, end, MASKED_ROWS):
            stop = min(start + MASKED_ROWS, end)
            seen = slice(shared, reach.at[stop - 1] + 1)
            bias = reach.merged_bias(start, stop, shared, group)
            part, lse = _with_lse(query[:, start:stop], key[:, seen], value[:, seen], bias, scale)
            if shared:
                rows_of_block = slice(start - first, stop - first)
                share = torch.sigmoid(before_lse[:, rows_of_block] - lse)
                part = torch.lerp(part, before[:, rows_of_block], share[..., None])
            out[:, start:stop] = part
    return out


def _with_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention ``[H, R, D]`` over ``[KVH, N, D]`` and the logarithm ``[H, R]`` of each row's sum of exponentials.

    No keys give zeros and minus infinity.
    """
    heads, rows, dims = query.shape
    if not key.shape[1]:
        return query.new_zeros(query.shape), query.new_full((heads, rows), float("-inf"))
    folded = query.reshape(1, key.shape[0], -1, dims)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, key[None], value[None], attn_mask=None if bias is None else bias[None, None], scale=scale
    )
    return out.reshape(heads, rows, dims), lse.reshape(heads, rows)

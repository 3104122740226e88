"""The kernels in plain torch: short, exact, and what every faster version is held against."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.checks import both
from blend.recompute.kernels.memory import Memory
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Pairing

_BLOCK = 64
"""Rows scored at a time: bounds the fp32 score matrix to ``heads × 64 × N``."""


def assemble(stored: Stored, layer: int, key: Tensor, value: Tensor, slots: Tensor, turns: Turns | None) -> None:
    """Put one layer of a request's stored chunks onto its canvas or into its blocks.

    Stored numbers are dequantized to float32, keys turned, and both cast once.

    Args:
        stored: the chunks, one after another.
        layer: which layer of theirs.
        key, value: the canvas's layer ``[KVH, N, D]``, or the blocks of all requests ``[blocks, P, KVH, D]``.
        slots: ``[T]`` int64, for each of the chunks' T tokens its position on the canvas, or
            ``block * P + place in the block``; each at most once; -1: the token is left out.
        turns: how far the keys of each chunk turn; ``None``: this layer's keys do not know positions.
    """
    start = 0
    for chunk, count in enumerate(stored.tokens):
        at = slots[start : start + count]
        start += count
        keys, values = stored.numbers(chunk, layer)
        if turns is not None:
            keys = _turned(keys, turns.cos[chunk], turns.sin[chunk], turns.pairing)
        kept = at >= 0
        for target, numbers in ((key, keys), (value, values)):
            if target.ndim == 4:
                page = target.shape[1]
                tokens = numbers[:, kept].transpose(0, 1).to(target.dtype)
                target[at[kept] // page, at[kept] % page] = tokens
            else:
                target[:, at[kept]] = numbers[:, kept].to(target.dtype)


def attend(
    query: Tensor,
    memory: Memory,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of rows at any positions, each over its own request's keys up to and including its own position.

    What stands at positions that a row may not read changes no bit of its result, as long as it is finite; what
    stands behind the request's last row is not even read.

    Args:
        query: ``[H, R, D]``, the rows of all requests; H is a multiple of KVH, heads of one KV head lie side by side.
        memory, layer: keys and values, which hold the rows' own already.
        batch: where the rows stand, and which keys they may read besides their own.
        scale: what scores are multiplied by.
        window: a row at p reads keys above ``p - window`` only; ``None``: from 0 on.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).

    Returns:
        ``[H, R, D]`` in the dtype of ``query``.
    """
    kv_heads = memory.kv_heads
    parts = []
    for request, positions in enumerate(batch.positions):
        length = batch.length(request)
        key, value = (numbers.float() for numbers in memory.views(request, layer, length))
        mask = batch.visible[request]
        mine = query[:, batch.starts[request] : batch.starts[request + 1]].unflatten(0, (kv_heads, -1)).float()
        for at, rows in zip(positions.split(_BLOCK), mine.split(_BLOCK, 2), strict=True):
            seen = _seen(at, length, window, None if mask is None else mask[:length])
            scores = _bent(torch.einsum("kgrd,knd->kgrn", rows, key) * scale, softcap)
            shares = scores.masked_fill_(~seen, float("-inf")).softmax(-1)
            parts.append(torch.einsum("kgrn,knd->kgrd", shares, value).flatten(0, 1))
    return torch.cat(parts, 1).to(query.dtype)


def commit(
    key: Tensor,
    value: Tensor,
    memory: Memory,
    layer: int,
    batch: Batch,
    *,
    score: Literal["key", "value", "both"] | None = None,
) -> Tensor | None:
    """Write the batch's fresh keys and values, both as attention reads them, to where their rows stand.

    Args:
        key, value: ``[KVH, R, D]``, the rows of all requests.
        memory, layer: where to.
        batch: where the rows stand.
        score: whether to return how far keys, values or both lie from what was there before.

    Returns:
        ``[R]`` float32, the :func:`deviation` of each row, or ``None``.
    """
    if score not in (None, "key", "value", "both"):
        raise InvalidInput("score", score, "key, value, both, or none")
    scores = []
    for request, positions in enumerate(batch.positions):
        rows = slice(batch.starts[request], batch.starts[request + 1])
        fresh = key[:, rows], value[:, rows]
        if score is not None:
            compared = slice(score == "value", 1 + (score != "key"))
            cached = memory.views(request, layer, batch.length(request))
            parts = [deviation(a, b, positions) for a, b in zip(fresh[compared], cached[compared], strict=True)]
            scores.append(torch.stack(parts).sum(0))
        memory.write(request, layer, positions, *fresh)
    return torch.cat(scores) if scores else None


def deviation(
    fresh: Tensor | tuple[Tensor, Tensor],
    cached: Tensor | tuple[Tensor, Tensor],
    positions: Tensor | None = None,
) -> Tensor:
    """Return how far fresh keys or values lie from cached ones, per token.

    Args:
        fresh: ``[KVH, T, D]``, keys or values, or a pair of both.
        cached: the same in the same dtype, or with ``positions`` the canvas's layer ``[KVH, N, D]``.
        positions: ``[T]`` int64, where the tokens stand on it.

    Returns:
        ``[T]`` float32: the squared distance summed over heads and dimensions, and over keys and values.
        Source: CacheBlend (EuroSys 2025), which selects by that of the values at one early layer.
    """
    total = torch.zeros((), dtype=torch.float32)
    for new, old in zip(both(fresh), both(cached), strict=True):
        there = old if positions is None else old[:, positions]
        total = total + (new.float() - there.float()).square().sum(dim=(0, 2))
    return total


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
    """Return the attention mass that query rows put on every key, summed over heads and rows.

    Args:
        query: ``[H, R, D]``; key: ``[KVH, N, D]`` with H a multiple of KVH.
        positions: ``[R]`` int64, ascending; row i sees keys up to and including ``positions[i]``.
        scale, window, softcap: the layer's attention parameters; a window w shows the last w positions.
        visible: ``[N]`` bool, keys that may be read besides a row's own; ``None`` means all.

    Returns:
        ``[N]`` float32; its sum is H × R.
    """
    heads, _, dim = query.shape
    kv_heads, length, _ = key.shape
    total = torch.zeros(length, dtype=torch.float32, device=query.device)
    for at, rows in zip(positions.split(_BLOCK), query.split(_BLOCK, 1), strict=True):
        scores = (rows.reshape(kv_heads, -1, dim) @ key.transpose(1, 2)).float() * scale
        scores = _bent(scores, softcap).view(kv_heads, heads // kv_heads, len(at), length)
        scores.masked_fill_(~_seen(at, length, window, visible), float("-inf"))
        total += scores.softmax(dim=-1).sum(dim=(0, 1, 2))
    return total


def move(key: Tensor, mean: Tensor, spans: Spans, turns: Turns | None) -> None:
    """Add to the keys, or values, of each span one vector, turned to where they stand, in float32 and rounded once.

    Args:
        key: ``[KVH, N, D]``, one layer's canvas, which is changed in place.
        mean: ``[KVH, C, D]`` float32, what each of the C spans moves by in a frame without rotation.
        spans: which keys are moved.
        turns: for each position up to the last span's end how far what it moves by turns, 0 in both tables where
            nothing moves; dimensions that do not turn move by the mean itself. ``None``: none turns.
    """
    pairs = 0 if turns is None else turns.cos.shape[1]
    for span, (start, end) in enumerate(spans.bounds):
        own, by = key[:, start:end], mean[:, span : span + 1]
        if turns is not None:
            cos, sin = turns.cos[start:end], turns.sin[start:end]
            (x, y), (a, b) = _pairs(own, pairs, turns.pairing), _pairs(by, pairs, turns.pairing)
            x.add_((a * cos).addcmul_(b, sin, value=-1))
            y.add_((b * cos).addcmul_(a, sin))
        if 2 * pairs < key.shape[2]:
            own[..., 2 * pairs :].add_(by[..., 2 * pairs :] * spans.moved[start:end, None])


def _seen(positions: Tensor, length: int, window: int | None, visible: Tensor | None) -> Tensor:
    """``[R, length]`` bool: which keys a row at each of ``positions`` reads."""
    own = positions[:, None]
    keys = torch.arange(length, device=positions.device)
    seen = keys <= own
    if window is not None:
        seen &= keys > own - window
    if visible is not None:
        seen &= visible | (keys == own)
    return seen


def _bent(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _turned(keys: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """``keys`` ``[..., D]`` float32, their P pairs turned by the angles of ``cos`` and ``sin`` ``[P]``."""
    turned = keys.clone()
    (x, y), (out_x, out_y) = _pairs(keys, len(cos), pairing), _pairs(turned, len(cos), pairing)
    out_x.copy_(x * cos - y * sin)
    out_y.copy_(y * cos + x * sin)
    return turned


def _pairs(keys: Tensor, pairs: int, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Both members of every pair of ``keys`` ``[..., D]``, ``[..., P]`` each, as views."""
    if pairing == "interleaved":
        return keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
    return keys[..., :pairs], keys[..., pairs : 2 * pairs]

"""The kernels in plain torch: short, exact, and what every faster version is held against."""

from __future__ import annotations

import torch

_BLOCK = 64
"""Question rows scored at a time: bounds the fp32 score matrix to ``heads × 64 × N``."""


def deviation(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Return how far fresh keys or values lie from cached ones, per token.

    Args:
        fresh, cached: ``[KVH, T, D]``, the same dtype.

    Returns:
        ``[T]`` float32: the squared distance summed over heads and dimensions.
        Source: CacheBlend (EuroSys 2025), which selects by it at one early layer.
    """
    return (fresh.float() - cached.float()).square().sum(dim=(0, 2))


def mass(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention mass that query rows put on every key, summed over heads and rows.

    Args:
        query: ``[H, R, D]``; key: ``[KVH, N, D]`` with H a multiple of KVH.
        positions: ``[R]`` int64; row i sees keys up to and including ``positions[i]``.
        scale, window, softcap: the layer's attention parameters; a window w shows the last w positions.
        visible: ``[N]`` bool, keys that may be read besides a row's own; ``None`` means all.

    Returns:
        ``[N]`` float32; its sum is H × R.
    """
    heads, rows, dim = query.shape
    kv_heads, length, _ = key.shape
    group = heads // kv_heads
    total = torch.zeros(length, dtype=torch.float32, device=query.device)
    index = torch.arange(length, device=query.device)
    for start in range(0, rows, _BLOCK):
        at = positions[start : start + _BLOCK, None]
        block = query[:, start : start + _BLOCK].reshape(kv_heads, -1, dim)
        scores = (block @ key.transpose(1, 2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = index <= at
        if window is not None:
            seen &= index > at - window
        if visible is not None:
            seen &= visible | (index == at)
        scores = scores.view(kv_heads, group, len(at), length)
        scores.masked_fill_(~seen, float("-inf"))
        total += scores.softmax(dim=-1).sum(dim=(0, 1, 2))
    return total

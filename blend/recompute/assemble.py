"""Places stored chunks on a canvas: keys turned by one constant shift, values as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blend.recompute.canvas import Canvas
from blend.recompute.rope import Rotation


def place(
    canvas: Canvas,
    payload: torch.Tensor,
    start: int,
    *,
    stored_at: int,
    rotations: Sequence[Rotation | None],
    tokens: int | None = None,
) -> None:
    """Write a chunk's KV to positions ``start`` and up.

    Args:
        canvas: where to write, ``[L, KVH, N, D]``.
        payload: ``[L, 2, KVH, T, D]``, keys then values of each layer.
        start: position of the chunk's first token on the canvas.
        stored_at: position that it was computed at; keys turn by ``start - stored_at``.
        rotations: one per layer, ``None`` for a layer that does not rotate. Layers of one rotary group share one
            object and are turned in one go.
        tokens: how many of the T tokens to write; ``None`` means all.
    """
    count = payload.shape[3] if tokens is None else tokens
    span = slice(start, start + count)
    canvas.v[:, :, span] = payload[:, 1, :, :count]
    groups: dict[int, list[int]] = {}
    for layer, rotation in enumerate(rotations):
        groups.setdefault(id(rotation), []).append(layer)
    for layers in groups.values():
        rotation = rotations[layers[0]]
        whole = len(layers) == len(rotations)
        keys = payload[:, 0, :, :count] if whole else payload[layers, 0, :, :count]
        if rotation is not None:
            keys = rotation.rotate(keys, start - stored_at)
        if whole:
            canvas.k[:, :, span] = keys
        else:
            canvas.k[layers, :, span] = keys

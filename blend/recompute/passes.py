"""Rows of one canvas in slices, so that the memory of a forward pass stays flat however long the prompt is."""

from __future__ import annotations

import torch

from blend.model.decoder import Decoder, Observer, Rows
from blend.recompute.canvas import Canvas


def run(
    decoder: Decoder,
    canvas: Canvas,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    max_rows: int,
    *,
    visible: torch.Tensor | None = None,
    observer: Observer | None = None,
) -> torch.Tensor | None:
    """Compute the rows at ``positions`` and return the last one's logits ``[V]`` float32.

    Slices of ``max_rows`` run in ascending order, so that a later one reads the fresh KV of the earlier ones: the
    result does not depend on ``max_rows``.

    Args:
        token_ids: ``[N]`` int64, of the whole prompt.
        positions: ``[R]`` int64, ascending, at least one.
        visible, observer: as for :class:`~blend.model.decoder.Rows`; the observer sees every slice.

    Returns:
        ``None`` if the observer stopped the last slice.
    """
    logits = None
    for part in positions.split(max_rows):
        rows = Rows(canvas, part, token_ids[part], visible=visible, observer=observer)
        logits = decoder.forward([rows])
    return None if logits is None else logits[0]


def everything(decoder: Decoder, canvas: Canvas, token_ids: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Compute every position of ``token_ids`` ``[N]``: full prefill. Returns the last one's logits ``[V]``."""
    logits = run(decoder, canvas, token_ids, torch.arange(len(token_ids), device=token_ids.device), max_rows)
    return unstopped(logits)


def unstopped(logits: torch.Tensor | None) -> torch.Tensor:
    """Return ``logits`` of a pass that nobody observes, and that hence nobody can have stopped."""
    if logits is None:
        raise RuntimeError("a forward pass was stopped although nobody observed it")
    return logits


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock that is read next shows work done and not work begun."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

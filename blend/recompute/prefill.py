"""Full and blended prefill of one canvas: mandatory and selected rows, in slices that keep memory flat."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from blend.model.decoder import Decoder, Rows
from blend.recompute.budget import Budget
from blend.recompute.canvas import Canvas
from blend.recompute.select.base import Blend, Selection, Selector


@dataclass(frozen=True, eq=False)
class Outcome:
    """``logits`` ``[V]`` float32 of the last position, the selection, and both times in milliseconds."""

    logits: torch.Tensor
    selection: Selection
    rows: torch.Tensor
    select_ms: float
    recompute_ms: float


def run(
    decoder: Decoder, canvas: Canvas, token_ids: torch.Tensor, positions: torch.Tensor, max_rows: int
) -> torch.Tensor:
    """Compute the rows at ``positions`` ``[R]`` (ascending, at least one) and return the last one's logits ``[V]``.

    Slices run in ascending order, so that a later one reads the fresh KV of the earlier ones: the result does
    not depend on ``max_rows``.
    """
    logits = None
    for part in positions.split(max_rows):
        logits = decoder.forward([Rows(canvas, part, token_ids[part])])
    if logits is None:
        raise RuntimeError("a forward pass was stopped although nobody observed it")
    return logits[0]


def full(decoder: Decoder, canvas: Canvas, token_ids: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Compute every position and return the last one's logits ``[V]`` float32."""
    return run(decoder, canvas, token_ids, torch.arange(len(token_ids), device=token_ids.device), max_rows)


def blended(blend: Blend, selector: Selector | None, budget: Budget, max_rows: int) -> Outcome:
    """Select, then compute misses, plain text and the selected tokens.

    ``selector=None`` selects nothing. Rows that the selector's probe left final are not run again.
    """
    start = perf_counter()
    none = Selection(torch.zeros(0, dtype=torch.int64, device=blend.token_ids.device))
    selection = none if selector is None else selector.select(blend, budget)
    selected = perf_counter()
    wanted = blend.text | blend.missing
    wanted[selection.positions] = True
    wanted[: selection.exact_until] = False
    rows = wanted.nonzero().squeeze(1)
    logits = run(blend.decoder, blend.canvas, blend.token_ids, rows, max_rows)
    done = perf_counter()
    return Outcome(logits, selection, rows, (selected - start) * 1e3, (done - selected) * 1e3)

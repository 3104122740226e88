"""Blended prefill of one canvas: select, then compute mandatory and selected rows."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from blend.recompute import passes
from blend.recompute.budget import Budget
from blend.recompute.select.base import Blend, Selection, Selector


@dataclass(frozen=True, eq=False)
class Outcome:
    """``logits`` ``[V]`` float32 of the last position, the selection, and both times in milliseconds."""

    logits: torch.Tensor
    selection: Selection
    rows: torch.Tensor
    select_ms: float
    recompute_ms: float


def blended(blend: Blend, selector: Selector | None, budget: Budget) -> Outcome:
    """Select, then compute misses, plain text and the selected tokens.

    ``selector=None`` selects nothing. Rows that the selector's probe left final are not run again.
    """
    start = perf_counter()
    none = Selection(torch.zeros(0, dtype=torch.int64, device=blend.token_ids.device))
    selection = none if selector is None else selector.select(blend, budget)
    passes.synchronize(blend.decoder.device)
    selected = perf_counter()
    wanted = blend.text | blend.missing
    wanted[selection.positions] = True
    wanted[: selection.exact_until] = False
    rows = wanted.nonzero().squeeze(1)
    logits = passes.unstopped(passes.run(blend.decoder, blend.canvas, blend.token_ids, rows, blend.max_rows))
    passes.synchronize(blend.decoder.device)
    done = perf_counter()
    return Outcome(logits, selection, rows, (selected - start) * 1e3, (done - selected) * 1e3)

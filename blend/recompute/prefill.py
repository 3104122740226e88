"""Blended prefill of one canvas: select, then compute mandatory and selected rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import torch

from blend.model.rows import Observer
from blend.recompute import passes
from blend.recompute.budget import Budget
from blend.recompute.select.base import Blend, Selection

Choose: TypeAlias = Callable[[Blend, Budget], Selection]
"""What selects: :meth:`blend.recompute.select.Selector.select`, or another function of its kind."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a prefill.

    ``logits`` ``[V]`` float32 of the last position, the selection, the final pass's rows ``[R]``, and the
    milliseconds of both passes, without what filling the canvas took meanwhile.
    """

    logits: torch.Tensor
    selection: Selection
    rows: torch.Tensor
    select_ms: float
    recompute_ms: float


class Repair(ABC):
    """A way from chunks as they were stored to a prefilled prompt that is none of the engine's methods.

    Evaluation compares the methods with such. ``name`` is the report's mode, ``ratio`` what it says was requested.
    """

    name: str
    ratio: float

    @abstractmethod
    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        """Prefill the prompt; afterwards the canvas holds KV for all of its positions.

        The report charges the outcome's selection, so its positions are those of cached tokens alone.
        """


def blended(blend: Blend, choose: Choose | None, budget: Budget) -> Outcome:
    """Select, then compute misses, plain text and the selected tokens.

    ``choose=None`` selects nothing. Rows that the choice's probe left final are not run again.
    """
    clock = Clock(blend)
    selection = nothing(blend) if choose is None else choose(blend, budget)
    select_ms = clock.lap()
    rows = rows_of(blend, selection)
    logits = passes.unstopped(
        passes.run(blend.decoder, blend.canvas, blend.token_ids, rows, blend.max_rows, observer=observer_of(selection))
    )
    return Outcome(logits, selection, rows, select_ms, clock.lap())


def nothing(blend: Blend) -> Selection:
    """Return the selection of no token."""
    return Selection(torch.zeros(0, dtype=torch.int64, device=blend.token_ids.device))


def observer_of(selection: Selection) -> Observer | None:
    """Return what watches the final pass: where KV is moved by what it computes, that."""
    return None if selection.correction is None else selection.correction.observer()


def rows_of(blend: Blend, selection: Selection) -> torch.Tensor:
    """Return the positions ``[R]`` of the final pass: misses, plain text, selected tokens, unless final already."""
    wanted = blend.text | blend.missing
    wanted[selection.positions] = True
    wanted[: selection.exact_until] = False
    return wanted.nonzero().squeeze(1)


class Clock:
    """Milliseconds from lap to lap, without what filling the canvas took."""

    def __init__(self, blend: Blend) -> None:
        self._blend = blend
        self._last = self._now()

    def _now(self) -> float:
        passes.synchronize(self._blend.decoder.device)
        return perf_counter() * 1e3 - self._blend.canvas.fill_ms

    def lap(self) -> float:
        """Return the milliseconds since the last lap, or since the clock was made."""
        before, self._last = self._last, self._now()
        return self._last - before

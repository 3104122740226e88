"""The selector contract: which cached tokens are computed afresh."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from blend.model.decoder import Decoder
from blend.recompute.budget import Budget
from blend.recompute.canvas import Canvas
from blend.recompute.correct import Correction


@dataclass(frozen=True, eq=False)
class Blend:
    """A prompt whose canvas holds the KV of its loaded chunks, ready for selection.

    Args:
        decoder, canvas: the model and the request's KV.
        token_ids: ``[N]`` int64.
        chunks: ``(start, end)`` of every chunk whose KV was loaded, ascending.
        candidates: ``[N]`` bool: loaded tokens whose KV is not exact already.
        missing: ``[N]`` bool: tokens of chunks that have no KV; they are rows of the final pass.
        text: ``[N]`` bool: plain text, the question included; rows of the final pass as well.
        question: ``(start, end)`` of the plain text that ends the prompt.
        max_rows: most rows of one forward pass.
        sensitivity: ``[L, N]`` float32: how far the values of each loaded token moved when its chunk was encoded behind
            others; the layer's mean for chunks of which that is not known, 0 for all other tokens. ``None`` where it is
            not known of any chunk.
    """

    decoder: Decoder
    canvas: Canvas
    token_ids: torch.Tensor
    chunks: tuple[tuple[int, int], ...]
    candidates: torch.Tensor
    missing: torch.Tensor
    text: torch.Tensor
    question: tuple[int, int]
    max_rows: int
    sensitivity: torch.Tensor | None = None

    @property
    def first_loaded(self) -> int:
        """Start of the first loaded chunk, or the prompt's length: everything left of it is a plain prefill."""
        return self.chunks[0][0] if self.chunks else len(self.token_ids)

    @property
    def cached(self) -> int:
        """Tokens whose KV was loaded."""
        return sum(end - start for start, end in self.chunks)


@dataclass(frozen=True, eq=False)
class Selection:
    """What a selector chose and what choosing cost.

    ``positions`` ``[S]`` int64 ascending; ``probe`` counts the token-layers that were computed to choose.
    Every position below ``exact_until`` holds its final, exact KV already and need not run again. ``correction`` says
    how the KV of the others is moved by what is computed, if it is.
    """

    positions: torch.Tensor
    probe: int = 0
    exact_until: int = 0
    correction: Correction | None = None


class Selector(ABC):
    """One way to choose. Selectors hold no state between requests."""

    name: str

    def probe_cost(self, blend: Blend) -> int:
        """Return the token-layers that :meth:`scores` computes, known before it runs."""
        return 0

    def exact_until(self, blend: Blend) -> int:
        """Return the position up to which :meth:`scores` leaves final, exact KV behind."""
        return 0

    @abstractmethod
    def scores(self, blend: Blend) -> torch.Tensor:
        """Return ``[N]`` float32: the higher, the sooner a token is selected. Only candidates are looked at.

        They are over all heads: where shards share these, scores are totals over the shards, which then choose alike.
        """

    def ahead(self, blend: Blend, rows: int) -> torch.Tensor:
        """Return the positions ``[S]`` int64, none of them twice, that go before all others, whatever their score.

        Args:
            rows: how many tokens can be selected.
        """
        return torch.zeros(0, dtype=torch.int64, device=blend.token_ids.device)

    def correction(self, blend: Blend, positions: torch.Tensor) -> Correction | None:
        """Return how cached tokens are moved where those at ``positions`` ``[S]`` are computed afresh."""
        return None

    def select(self, blend: Blend, budget: Budget) -> Selection:
        """Return the best candidates that the budget allows, those of :meth:`ahead` first.

        Among equal scores the earlier position wins.

        No probe runs where there is nothing to choose: no budget, or enough for every candidate.
        """
        where = blend.candidates.nonzero().squeeze(1)
        if budget.rows(probe=0) >= len(where):
            return Selection(where)
        probe = self.probe_cost(blend)
        rows = budget.rows(probe)
        if rows == 0:
            return Selection(where[:0])
        scores = self.scores(blend).index_fill(0, self.ahead(blend, rows), math.inf)
        order = torch.sort(scores[where], descending=True, stable=True).indices[:rows]
        chosen = where[order].sort().values
        return Selection(chosen, probe, self.exact_until(blend), self.correction(blend, chosen))

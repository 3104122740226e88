"""One prompt's tokens as a method treated them: which were chosen, and with what score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from blend.engine import Engine
from blend.eval.plan import Planned
from blend.eval.prompts import chunks_of
from blend.eval.values import Heatmap, State
from blend.recompute.budget import Budget
from blend.recompute.correct import Correction
from blend.recompute.prefill import Outcome, Repair, blended
from blend.recompute.select import Blend, Selector, methods, selector
from blend.types import Chunk, Plan, Prompt


def subject(planned: Sequence[Planned]) -> Planned | None:
    """Return what a heatmap is to show: ``query`` where it is planned, else the engine's first method that selects."""
    selecting = [p for p in planned if p.ratio is not None and p.method in methods()]
    return next((p for p in selecting if p.method == "query"), selecting[0] if selecting else None)


def heatmap(engine: Engine, question: str, prompt: Prompt, planned: Planned, *, namespace: str) -> Heatmap:
    """Prefill a prompt once more and return how each of its tokens fared.

    Args:
        question: the question's id.
        planned: one of the engine's methods that select, with its ratio.
    """
    engine.precompute(chunks_of(prompt), namespace=namespace)
    seen = _Seen(planned)
    engine.prefill(prompt, Plan("reuse"), namespace=namespace, repair=seen)
    return Heatmap(
        question=question,
        method=planned.method,
        ratio=planned.ratio,
        tokens=tuple(piece for segment in prompt.segments for piece in engine.tokenizer.pieces(segment.token_ids)),
        state=tuple(seen.state),
        scores=tuple(seen.scores),
        chunks=tuple((start, end) for start, end, segment in prompt.spans() if isinstance(segment, Chunk)),
    )


class _Seen(Repair):
    """A method that does what another does and keeps what it saw: a state and a score for each token."""

    def __init__(self, planned: Planned) -> None:
        self.name = planned.method
        self.ratio = planned.ratio or 0.0
        self.state: list[State] = []
        self.scores: list[float | None] = []

    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        """Select and recompute as the method does."""
        inner = selector(self.name)
        scored = _Scored(inner) if inner is not None else None
        outcome = blended(blend, None if scored is None else scored.select, budget)
        self.state = ["mandatory"] * len(blend.token_ids)
        for start, end in blend.chunks:
            self.state[start:end] = ["cached"] * (end - start)
        for position in outcome.selection.positions.tolist():
            self.state[position] = "chosen"
        self.scores = [None] * len(blend.token_ids)
        if scored is not None and scored.kept is not None:
            for position in blend.candidates.nonzero().squeeze(1).tolist():
                score = float(scored.kept[position])
                self.scores[position] = score if math.isfinite(score) else None
        return outcome


class _Scored(Selector):
    """A selector that keeps another's scores."""

    def __init__(self, inner: Selector) -> None:
        self.name = inner.name
        self.kept: torch.Tensor | None = None
        self._inner = inner

    def probe_cost(self, blend: Blend) -> int:
        """The other's."""
        return self._inner.probe_cost(blend)

    def exact_until(self, blend: Blend) -> int:
        """The other's."""
        return self._inner.exact_until(blend)

    def ahead(self, blend: Blend, rows: int) -> torch.Tensor:
        """The other's."""
        return self._inner.ahead(blend, rows)

    def correction(self, blend: Blend, positions: torch.Tensor) -> Correction | None:
        """The other's."""
        return self._inner.correction(blend, positions)

    def scores(self, blend: Blend) -> torch.Tensor:
        """The other's, kept."""
        self.kept = self._inner.scores(blend).cpu()
        return self.kept.to(blend.token_ids.device)

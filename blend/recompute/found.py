"""What was found of a request's chunks, and the work that a decision makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blend.recompute.cost import Work
from blend.types import PLAIN_METHODS

if TYPE_CHECKING:
    from blend.recompute.planner import Decision


class Probe(NamedTuple):
    """What choosing costs: token-layers of reusable tokens, and up to where it leaves final rows behind."""

    charged: int = 0
    exact_until: int = 0


@dataclass(frozen=True)
class Found:
    """What there is to decide on, once it is settled which of a request's chunks were loaded.

    Args:
        tokens, cached: of the prompt, and those of them whose KV was loaded.
        layers: of the model.
        mandatory: misses and plain text.
        candidates: cached tokens whose KV is not exact.
        conditioned: the share of these whose chunks were stored behind related ones.
        probe: a method's.
        nbytes: what is loaded from each tier, in bytes.
        exact_nbytes: as much of it as belongs to tokens whose KV is exact.
    """

    tokens: int
    cached: int
    layers: int
    mandatory: Work
    candidates: Work
    conditioned: float
    probe: Callable[[str], Probe]
    nbytes: Mapping[str, int] = field(default_factory=dict)
    exact_nbytes: Mapping[str, int] = field(default_factory=dict)

    def probing(self, decision: Decision) -> Work:
        """Return the work of choosing; none where nothing or everything is selected."""
        if decision.method in PLAIN_METHODS:
            return Work()
        budget, probe = decision.budget(self.layers, self.cached), self.probe(decision.method)
        if budget.rows(probe=0) >= self.candidates.rows or budget.rows(probe.charged) == 0:
            return Work()
        rows = probe.charged / self.layers  # each of which may read the whole prompt
        return Work(rows, rows * self.tokens).plus(Work.full(probe.exact_until))

    def computing(self, decision: Decision) -> Work:
        """Return the work of the final pass."""
        if decision.method == "full":
            return Work.full(self.tokens)
        if decision.method == "prefix":
            return self.mandatory.plus(self.candidates)
        if decision.method == "reuse" or not self.candidates.rows:
            return self.mandatory
        budget, probing = decision.budget(self.layers, self.cached), self.probing(decision)
        probe = self.probe(decision.method) if probing.rows else Probe()
        share = min(1.0, budget.rows(probe.charged) / self.candidates.rows)
        chosen = Work(share * self.candidates.rows, share * self.candidates.keys)
        return self.mandatory.plus(chosen).less(Work.full(probe.exact_until))

    def loading(self, decision: Decision) -> Mapping[str, int]:
        """Return the bytes to load from each tier."""
        return {"full": {}, "prefix": self.exact_nbytes}.get(decision.method, self.nbytes)

"""Methods by name: the engine's own, and those that only evaluation has, for what they say about the others."""

from __future__ import annotations

from blend.eval.methods.oracle import Oracle, Reference
from blend.eval.methods.released import Released
from blend.eval.methods.running import BASELINES, CONDITIONED, closed_book, names, prefill, split

__all__ = ["BASELINES", "CONDITIONED", "Oracle", "Reference", "Released", "closed_book", "names", "prefill", "split"]

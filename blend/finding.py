"""What was found of a request's chunks, as the planner weighs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

from torch import Tensor

from blend.filling import Loaded
from blend.recompute.cost import Work
from blend.recompute.found import Found, Probe
from blend.recompute.select import Blend, selector
from blend.types import ChunkReport


def found_of(blend: Blend, loaded: Loaded) -> Found:
    """Return what there is to decide on.

    Where shards share the model's heads, all of them have to ask, and chunks are conditioned only if they are for all.

    Args:
        blend: the prompt and what its canvas will hold.
        loaded: where that comes from.
    """
    exact = {start for start, _ in loaded.exact}
    hits = [report for report in loaded.reports if report.outcome == "hit"]
    repaired = [report for report in hits if report.start not in exact]
    conditioned = blend.decoder.shards.everywhere([report.variant != "plain" for report in repaired])
    tokens = [report.tokens for report in repaired]
    share = sum(n for n, behind in zip(tokens, conditioned, strict=True) if behind) / (sum(tokens) or 1)

    @cache
    def probe(method: str) -> Probe:
        chooser = selector(method)
        return Probe() if chooser is None else Probe(chooser.probe_cost(blend), chooser.exact_until(blend))

    return Found(
        tokens=len(blend.token_ids),
        cached=blend.cached,
        layers=blend.decoder.layers,
        mandatory=_work(blend.text | blend.missing),
        candidates=_work(blend.candidates),
        conditioned=share,
        probe=probe,
        nbytes=nbytes_of(loaded),
        exact_nbytes=_by_tier([report for report in hits if report.start in exact]),
    )


def nbytes_of(loaded: Loaded) -> Mapping[str, int]:
    """Return the bytes that a load reads from each tier."""
    return _by_tier([report for report in loaded.reports if report.outcome == "hit"])


def _by_tier(reports: list[ChunkReport]) -> Mapping[str, int]:
    total = Counter[str]()
    for report in reports:
        if report.tier is not None:
            total[report.tier] += report.nbytes
    return total


def _work(mask: Tensor) -> Work:
    """The work of rows at the positions of a mask ``[N]``."""
    positions = mask.nonzero()
    return Work(len(positions), int(positions.sum()) + len(positions))

"""A prefill against full prefill of the same prompt: distances and agreement of what they say next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from blend.errors import InvalidInput


def kl_rows(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(full ‖ other) ``[T]`` in nats from log-probabilities ``[T, V]`` each, which may be minus infinity."""
    surprise = (full - other).masked_fill(full == -math.inf, 0)  # what full rules out adds nothing
    return (full.exp() * surprise).sum(-1).clamp_min(0)


def top1_rows(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``[T]`` bool: where both rank the same token first, from logits or log-probabilities ``[T, V]`` each."""
    return full.argmax(-1) == other.argmax(-1)


def identical(full: Sequence[int], other: Sequence[int]) -> float:
    """Return 1 where two answers are the same token ids, else 0."""
    return float(tuple(full) == tuple(other))


def recovery(
    method: float, reuse: float, full: float, *, better: Literal["higher", "lower"] | None = None
) -> float | None:
    """Return the share of what plain reuse loses that a method wins back: ``(method - reuse) / (full - reuse)``.

    1 is as good as full prefill, 0 as bad as reuse, below 0 worse. That holds whichever way the metric points: of a KL,
    for which full prefill has 0, it is ``1 - method / reuse``.

    Returns ``None`` where reuse loses nothing: both have the same value, or, with ``better`` given, full prefill is the
    worse of the two, and coming nearer to it would be no gain.

    Raises:
        InvalidInput: a value is not finite.
    """
    for name, value in (("method", method), ("reuse", reuse), ("full", full)):
        if not math.isfinite(value):
            raise InvalidInput(f"recovery, {name}", value, "a finite number")
    if math.isclose(full, reuse, rel_tol=1e-9, abs_tol=1e-12):
        return None
    if better is not None and (full > reuse) != (better == "higher"):
        return None
    return (method - reuse) / (full - reuse)

"""A prefill against full prefill of the same prompt: distances and agreement of what they say next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


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

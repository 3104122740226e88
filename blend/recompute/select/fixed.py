"""Selectors that do not look at the model: by position, or by chance."""

from __future__ import annotations

import hashlib

import torch

from blend.recompute.select.base import Blend, Selector


class Head(Selector):
    """The first tokens of each chunk, the same number in each (EPIC / LegoLink: these are the misplaced sinks)."""

    name = "head"

    def scores(self, blend: Blend) -> torch.Tensor:
        """Return minus the offset within the chunk."""
        scores = torch.full((len(blend.token_ids),), float("-inf"))
        for start, end in blend.chunks:
            scores[start:end] = -torch.arange(end - start, dtype=torch.float32)
        return scores.to(blend.token_ids.device)


class Random(Selector):
    """Tokens by chance, the same ones whenever the same prompt comes again: the floor for every other method."""

    name = "random"

    def scores(self, blend: Blend) -> torch.Tensor:
        """Return uniform noise seeded by the prompt's tokens."""
        digest = hashlib.blake2b(blend.token_ids.cpu().numpy().tobytes(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.rand(len(blend.token_ids), generator=generator).to(blend.token_ids.device)

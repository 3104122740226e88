"""Where a model's heads are shared out: what those who hold a part each have to agree on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

ELSEWHERE = "another shard has not got it"
"""Why a chunk is there for none, as those say that have it."""


class Shards:
    """All that hold a part of one model's heads, seen by one of them. This class is the only one: it holds all heads.

    Forward passes of several shards wait for one another. So all of them have to make the same passes in the same
    order, and whatever a pass depends on goes through here first: scores are summed, and what one lacks none uses.
    Every method is a meeting: all shards call the same ones in the same order, with arguments of the same shape.

    Attributes:
        size: how many there are.
        rank: which of them this is, from 0.
    """

    size: int = 1
    rank: int = 0

    def total(self, scores: Tensor) -> Tensor:
        """Return the sum of everybody's scores, of the same shape and bit for bit the same for everybody."""
        return scores

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on all shards."""
        return list(flags)

    def first(self, value: int) -> int:
        """Return the value of rank 0: what depends on clocks is for one alone to say."""
        return value


ALONE = Shards()
"""Of a model whose heads nobody shares."""

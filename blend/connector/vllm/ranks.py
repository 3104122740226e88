"""vLLM's tensor-parallel ranks, which share a model's heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator

from blend.model.shards import ALONE, Shards


class Ranks(Shards):
    """The ranks of a tensor-parallel group. Scores go over the devices' network, flags over the hosts'."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.size, self.rank = group.world_size, group.rank_in_group
        self._group = group

    def total(self, scores: Tensor) -> Tensor:
        """Return the sum over ranks. It is added up here, in the order of ranks, so that no bit depends on the rank."""
        parts: Tensor = self._group.all_gather(scores[None], dim=0)
        return parts.sum(0)

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on all ranks."""
        if not flags:
            return []
        found = torch.tensor(flags, dtype=torch.int32, device="cpu")
        distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [bool(flag) for flag in found.tolist()]

    def first(self, value: int) -> int:
        """Return the value of rank 0."""
        found = torch.tensor([value], dtype=torch.int64, device="cpu")
        distributed.broadcast(found, self._group.first_rank, group=self._group.cpu_group)
        return int(found.item())


def shards() -> Shards:
    """Return this process's view of those who share the model's heads."""
    group = get_tp_group()
    return Ranks(group) if group.world_size > 1 else ALONE

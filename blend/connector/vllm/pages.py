"""A request's blocks in vLLM's paged cache: writing keys and values, and computing scattered tokens afresh.

Nothing here knows how a backend lays its blocks out. Writing goes through the backend's own update; recomputing through
its own attention, where each run of neighbouring tokens is a sequence of its own over the same block table that ends
with the run. In every layer all fresh keys and values are written before attention reads any, so that causal attention
over those sequences is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from blend.connector.vllm.tasks import checkpoint, rows_at_once
from blend.errors import InvalidInput

Watch: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]
"""Told of a layer, positions ``[R]`` and their fresh keys and values ``[R, KVH, D]``, before the blocks have these."""


class _Written(Exception):
    """All keys and values of a pass are in its blocks."""


class Pages:
    """The paged cache of one group of layers that share their block tables.

    Args:
        model: vLLM's model.
        attention: its attention layers by name, first layer first.
        config: vLLM's configuration.
        spec: of the group's cache.
    """

    def __init__(self, model: nn.Module, attention: Mapping[str, Attention], config: VllmConfig, spec: Any) -> None:
        self._model: Any = model
        self._attention = dict(attention)
        self._layers = tuple(attention.values())
        self._config = config
        self.block_size: int = spec.block_size
        self.device = next(model.parameters()).device
        builder = self._layers[0].attn_backend.get_builder_cls()
        self._builder = builder(spec, list(attention), config, self.device)
        scheduler = config.scheduler_config
        self.max_rows: int = scheduler.max_num_batched_tokens
        # Builders of GPU backends have room for that many sequences.
        self.max_runs: int = self.max_rows if self.device.type == "cpu" else scheduler.max_num_seqs

    def slots(self, positions: Tensor, blocks: Sequence[int]) -> Tensor:
        """Return the slots ``[R]`` int64 of positions ``[R]`` in a request whose block table is ``blocks``."""
        table = torch.tensor(blocks, dtype=torch.int64, device=positions.device)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write ``key`` and ``value``, ``[R, KVH, D]`` contiguous, into ``slots`` ``[R]`` of one layer."""
        attention = self._layers[layer]
        attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)

    def recompute(self, token_ids: Tensor, positions: Tensor, blocks: Sequence[int], watch: Watch | None = None) -> int:
        """Compute tokens afresh, their keys and values going into the request's blocks; returns the number of passes.

        A pass has at most ``max_rows`` tokens, in a task fewer if its steps are short. Passes run in ascending order,
        so that a later one reads what an earlier one wrote.

        Args:
            token_ids: ``[R]`` int64.
            positions: ``[R]`` int64, strictly ascending.
            blocks: the request's block table, long enough for the last position.
            watch: told of each pass's fresh keys and values, layer by layer.
        """
        passes, start = 0, 0
        while start < len(positions):
            part = self._part(positions, start, rows_at_once(self.max_rows))
            rows, runs = positions[part], runs_of(positions[part])
            metadata, slots = self.metadata(rows, runs, blocks)
            context = set_forward_context(
                metadata, self._config, num_tokens=len(rows), slot_mapping=slots, skip_compiled=True
            )
            with context, self._pass(metadata, slots, rows, watch):
                self._model(input_ids=token_ids[part], positions=rows)
            passes, start = passes + 1, part.stop
        return passes

    def _part(self, positions: Tensor, start: int, most: int) -> slice:
        """Rows from ``start`` on: ``most`` of them, fewer where these have more than ``max_runs`` runs."""
        stop = min(start + most, len(positions))
        breaks = (positions[start:stop].diff() != 1).nonzero().squeeze(1)
        return slice(start, stop if len(breaks) < self.max_runs else start + int(breaks[self.max_runs - 1]) + 1)

    @contextmanager
    def _pass(
        self, metadata: Mapping[str, Any], slots: Mapping[str, Tensor], positions: Tensor, watch: Watch | None
    ) -> Iterator[None]:
        """Inside the ``with`` block, a pass may be stopped behind the attention of each layer but the last.

        At that one it ends once keys and values are written: nobody wants to know what comes behind them.
        """
        rows, last = len(positions), len(self._layers) - 1

        def look(layer: int, name: str) -> Any:
            def hook(attention: Attention, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
                if get_forward_context().attn_metadata is not metadata:
                    return  # the engine's own pass, while this one stands still
                given = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
                shape = -1, attention.num_kv_heads, attention.head_size
                key, value = (given[each].view(shape) for each in ("key", "value"))
                if watch is not None:
                    watch(layer, positions, key, value)
                if layer == last:
                    self.write(last, slots[name], key.contiguous(), value.contiguous())
                    raise _Written

            return hook

        handles = [layer.register_forward_hook(lambda *_: checkpoint(rows)) for layer in self._layers[:-1]]
        handles += [
            attention.register_forward_pre_hook(look(layer, name), with_kwargs=True)
            for layer, (name, attention) in enumerate(self._attention.items())
            if layer == last or watch is not None
        ]
        try:
            yield
        except _Written:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def metadata(
        self, positions: Tensor, runs: Sequence[tuple[int, int]], blocks: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the attention metadata and the slots, both by layer, of rows in runs over one block table.

        Args:
            positions: ``[R]`` int64, ascending.
            runs: ``(start, end)`` of neighbouring positions among them, in order.
        """
        lengths = torch.tensor([0, *(end - start for start, end in runs)], dtype=torch.int32)
        starts = lengths.cumsum(0, dtype=torch.int32)
        ends = torch.tensor([end for _, end in runs], dtype=torch.int32)
        table = torch.tensor(blocks, dtype=torch.int32).expand(len(runs), -1).contiguous()
        slots = self.slots(positions, blocks)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            num_reqs=len(runs),
            num_actual_tokens=len(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            seq_lens_cpu_upper_bound=ends,
        )
        built = self._builder.build(0, common)
        return dict.fromkeys(self._attention, built), dict.fromkeys(self._attention, slots)


def runs_of(positions: Tensor) -> list[tuple[int, int]]:
    """Return ``(start, end)`` of each run of neighbouring positions, end exclusive.

    Args:
        positions: ``[R]`` int64, strictly ascending, at least one.
    """
    if not len(positions):
        raise InvalidInput("positions", "none", "at least one")
    ends = (positions.diff() != 1).nonzero().squeeze(1).tolist()
    values = positions.tolist()
    edges = [-1, *ends, len(values) - 1]
    return [(values[a + 1], values[b] + 1) for a, b in pairwise(edges)]

"""Selection by deviation: tokens whose fresh values lie farthest from the cached ones at an early layer."""

from __future__ import annotations

import torch

from blend.model.decoder import LayerAttention, Observer, Rows, StopForward
from blend.recompute.kernels import dispatch
from blend.recompute.passes import run
from blend.recompute.select.base import Blend, Selector


class _Watch(Observer):
    """Compares fresh and cached values at one layer, slice after slice, and ends each pass there."""

    def __init__(self, layer: int, deviation: dispatch.Deviation) -> None:
        self.layer = layer
        self.deviation = deviation
        self.found: list[torch.Tensor] = []

    def before_write(
        self,
        layer: int,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: LayerAttention,
    ) -> None:
        """Take the deviation when the check layer is reached."""
        if layer == self.layer:
            self.found.append(self.deviation(value, rows.canvas.v[layer], rows.positions))
            raise StopForward


class Deviation(Selector):
    """CacheBlend (EuroSys 2025) with exact causality: top tokens by V deviation at a check layer.

    Every token runs through the layers before the check layer and is projected at it; that pass is charged in
    full. The default check layer, 1, is that of the paper's released code.
    """

    name = "deviation"

    def __init__(self, check_layer: int = 1) -> None:
        self.check_layer = check_layer

    def _layer(self, blend: Blend) -> int:
        return min(self.check_layer, blend.decoder.layers - 1)

    def probe_cost(self, blend: Blend) -> int:
        """All cached tokens in every layer up to and including the check layer."""
        return blend.cached * (self._layer(blend) + 1)

    def scores(self, blend: Blend) -> torch.Tensor:
        """Return the squared V deviation per token at the check layer."""
        watch = _Watch(self._layer(blend), blend.decoder.kernels.deviation)
        positions = torch.arange(len(blend.token_ids), device=blend.token_ids.device)
        run(blend.decoder, blend.canvas, blend.token_ids, positions, blend.max_rows, observer=watch)
        return blend.decoder.shards.total(torch.cat(watch.found))

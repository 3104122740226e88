"""Selection by the question: tokens that the question's rows attend to most."""

from __future__ import annotations

import torch

from blend.model.decoder import LayerAttention, Observer, Rows, StopForward
from blend.recompute.correct import Correction, correction
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.passes import run
from blend.recompute.select.base import Blend, Selector


class _Watch(Observer):
    """Sums the attention mass of rows from position ``start`` on, over all layers but the first quarter of them.

    Args:
        weights: ``[L, N]``, what each layer's mass on each key counts; ``None``: all the same.
    """

    def __init__(
        self, start: int, length: int, device: torch.device, kernels: Kernels, weights: torch.Tensor | None
    ) -> None:
        self.start = start
        self.kernels = kernels
        self.weights = weights
        self.before = 0  # rows of the slice under way that stand before start
        self.total = torch.zeros(length, dtype=torch.float32, device=device)

    def after_write(
        self,
        layer: int,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor | None:
        """Add this layer's mass. Behind the last layer's nothing is wanted of the pass any more.

        Returns attention where one kernel gives both, unless most of the rows have no mass to add.
        """
        if layer == 0:
            self.before = int((rows.positions < self.start).sum())
        layers = rows.canvas.layers
        counted, last = (len(rows) - self.before) * (layer >= layers // 4), layer == layers - 1
        both, attended = self.kernels.attend_with_mass, None
        if both is not None and counted >= max(1, self.before) and not last:
            attended, mass = both(
                query,
                rows.canvas.k[layer],
                rows.canvas.v[layer],
                rows.positions,
                self.before,
                scale=attention.scale,
                window=attention.window,
                softcap=attention.softcap,
                visible=rows.visible,
            )
            self._add(layer, mass)
        elif counted:
            mass = self.kernels.mass(
                query[:, self.before :],
                rows.canvas.k[layer],
                rows.positions[self.before :],
                scale=attention.scale,
                window=attention.window,
                softcap=attention.softcap,
                visible=rows.visible,
            )
            self._add(layer, mass)
        if last:
            raise StopForward
        return attended

    def _add(self, layer: int, mass: torch.Tensor) -> None:
        if self.weights is not None:
            mass = mass[: self.weights.shape[1]] * self.weights[layer]
        self.total[: len(mass)] += mass


class Query(Selector):
    """The question's attention mass on each cached token, summed over heads and layers (cf. ProphetKV, 2026).

    The first quarter of the layers has no say: what these look at depends little on what is asked.

    Where tokens' sensitivity is known, the mass of each layer counts by it: what the question looks at matters as far
    as other passages would have changed it. The first tokens of each chunk go before all others, for they took the
    attention that the beginning of the prompt should have had (cf. EPIC); of a small budget they get half at most.

    What is not chosen is moved by what the chosen tokens show: see :mod:`blend.recompute.correct`.

    The probe runs the plain text over the cached keys; tokens of missing chunks are hidden from it. What lies
    left of the first loaded chunk runs along and is final afterwards, so the charge is for the rows behind it,
    which the final pass computes again.

    Args:
        heads: how many tokens of each chunk go first.
    """

    name = "query"

    def __init__(self, heads: int = 8) -> None:
        self.heads = heads

    def _rows(self, blend: Blend) -> torch.Tensor:
        rows = blend.text.clone()
        rows[: blend.first_loaded] = True
        return rows.nonzero().squeeze(1)

    def probe_cost(self, blend: Blend) -> int:
        """Every probe row behind the first loaded chunk, in every layer."""
        return int((self._rows(blend) >= blend.first_loaded).sum()) * blend.decoder.layers

    def exact_until(self, blend: Blend) -> int:
        """Everything left of the first loaded chunk."""
        return blend.first_loaded

    def ahead(self, blend: Blend, rows: int) -> torch.Tensor:
        """The first tokens of each chunk, as many of each."""
        each = min(self.heads, rows // (2 * len(blend.chunks))) if blend.chunks else 0
        spans = [torch.arange(start, min(start + each, end)) for start, end in blend.chunks]
        return torch.cat(spans).to(blend.token_ids.device) if spans else super().ahead(blend, rows)

    def correction(self, blend: Blend, positions: torch.Tensor) -> Correction | None:
        """By what the chosen tokens behind the chunks' heads show."""
        decoder, start = blend.decoder, blend.question[0]
        return correction(
            decoder.rotations, blend.chunks, blend.candidates, positions, start, self.heads, decoder.kernels
        )

    def scores(self, blend: Blend) -> torch.Tensor:
        """Return the mass per token, weighted by its sensitivity."""
        positions = self._rows(blend)
        visible = None
        if blend.missing[blend.first_loaded :].any():
            visible = torch.ones(blend.canvas.length, dtype=torch.bool, device=positions.device)
            visible[blend.first_loaded : len(blend.missing)] = ~blend.missing[blend.first_loaded :]
        watch = _Watch(
            blend.question[0], blend.canvas.length, positions.device, blend.decoder.kernels, blend.sensitivity
        )
        run(
            blend.decoder,
            blend.canvas,
            blend.token_ids,
            positions,
            blend.max_rows,
            visible=visible,
            observer=watch,
        )
        return blend.decoder.shards.total(watch.total[: len(blend.token_ids)])

"""How much memory a prefill takes: the canvas, and on top of it one layer of fresh activations, slice by slice.

What follows the prompt's length is small beside the canvas: masks, one layer of chunks on their way to a device, the
scores of a selector. Everything else is bounded by the rows of one slice. The numbers are upper bounds, near the truth:
``tests/recompute/test_scratch.py`` holds them against what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from blend.model.decoder import Decoder
from blend.model.wide import computes_in
from blend.recompute.attention import BLOCK_ROWS, KEPT_BYTES, MASKED_ROWS
from blend.recompute.kernels import cpu
from blend.recompute.kernels.batch import WAVES
from blend.recompute.kernels.dispatch import Backend

_SINGLE = 4
"""Bytes of a float32."""

_PER_TOKEN = 96
"""Bytes of a token's id, position and place in the masks that describe a prompt and in the selectors' sums."""

_TILE_ROWS = 128
"""Most rows of a tile of Triton's attention."""

_MASS_ROWS, _MASS_KEYS = 512, 64
"""Rows of a round of Triton's mass, and the keys that one of its programs reads."""


@dataclass(frozen=True)
class Need:
    """Bytes that a prefill takes at most.

    Attributes:
        canvas: KV of all layers and positions.
        prompt: token ids, positions and masks over them.
        activations: of one slice of rows in one layer.
        attention: masks, scores and partial results of one layer's attention.
        probe: what a selector's sums take beside it.
        staging: one layer of stored chunks on their way to the canvas.
        logits: of the last position.
    """

    canvas: int
    prompt: int
    activations: int
    attention: int
    probe: int
    staging: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Shapes:
    """What of a model and of how it runs decides over memory.

    Attributes:
        layers, heads, kv_heads, head_dim: L, H, KVH and D.
        hidden, intermediate: numbers of a row between layers, and within the widest part of one, all experts that a
            row goes through taken together.
        vocabulary: V.
        dtype: of weights and canvases.
        backend: of the kernels.
        windows: how many kinds of attention layers there are, each with masks of its own.
        softcap: whether attention bends its scores, and hence holds them.
        widened: whether linear layers convert rows and weights to float32.
        staged: whether stored chunks are copied to a device before they are placed.
        processors: multiprocessors of a GPU; 1 elsewhere.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype
    backend: Backend = "torch"
    windows: int = 1
    softcap: bool = False
    widened: bool = False
    staged: bool = False
    processors: int = 1

    @classmethod
    def of(cls, decoder: Decoder) -> Shapes:
        """Those of a decoder."""
        config: Any = decoder.model.config.get_text_config(decoder=True)
        hidden: int = config.hidden_size
        experts = getattr(config, "num_experts_per_tok", None) or 1
        device, backend = decoder.device, decoder.kernels.backend
        gpu = device.type == "cuda"
        return cls(
            layers=decoder.layers,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            hidden=hidden,
            intermediate=(getattr(config, "intermediate_size", None) or 4 * hidden) * experts,
            vocabulary=decoder.vocab_size,
            dtype=decoder.dtype,
            backend=backend,
            windows=len(set(getattr(config, "layer_types", None) or ("full_attention",))),
            softcap=getattr(config, "attn_logit_softcapping", None) is not None,
            widened=not gpu and not computes_in(decoder.dtype, device),
            staged=backend != "torch" or not cpu.supports(decoder.dtype, device),
            processors=torch.cuda.get_device_properties(device).multi_processor_count if gpu else 1,
        )


class Scratch:
    """Plans the memory of prefills.

    Args:
        shapes: of the model that they are for.
        max_rows: most rows of one slice.
    """

    def __init__(self, shapes: Shapes, max_rows: int) -> None:
        self._shapes = shapes
        self._max_rows = max_rows

    def need(self, tokens: int, rows: int | None = None) -> Need:
        """What prefilling a canvas of ``tokens`` positions takes at most, whatever the method.

        ``rows`` is the most that are computed of it; ``None``: every position.
        """
        shapes, slice_ = self._shapes, min(tokens if rows is None else rows, self._max_rows)
        size = shapes.dtype.itemsize
        layer = 2 * shapes.kv_heads * tokens * shapes.head_dim
        return Need(
            canvas=shapes.layers * layer * size,
            prompt=tokens * _PER_TOKEN,
            activations=self._activations(slice_),
            attention=self._attention(tokens, slice_),
            probe=self._probe(tokens, slice_),
            staging=self._staging(layer),
            logits=shapes.vocabulary * (size + _SINGLE),
        )

    def _activations(self, rows: int) -> int:
        """The largest of what the two halves of a layer hold, and what its norms do where they compute in float32."""
        s, size = self._shapes, self._shapes.dtype.itemsize
        query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = (2 * s.hidden + 5 * query + 4 * key) * size
        mlp = 3 * (s.hidden + s.intermediate) * size
        norm = 2 * s.hidden * size + 3 * s.hidden * _SINGLE
        weights = 0
        if s.widened:
            widest = max(query + 2 * key, s.intermediate)
            mlp += (s.hidden + widest) * _SINGLE
            weights = s.hidden * widest * _SINGLE
        return rows * max(attention, mlp, norm) + weights

    def _attention(self, tokens: int, rows: int) -> int:
        s, size = self._shapes, self._shapes.dtype.itemsize
        if s.backend == "triton":
            # A tile is split into no more than 4/3 of the parts that keep all processors busy; float32 and a weight.
            parts = -(-4 * WAVES * s.processors // 3) + s.kv_heads
            return parts * _TILE_ROWS * (s.head_dim + 1) * _SINGLE + rows * s.heads * s.head_dim * size
        group, block = s.heads // s.kv_heads, min(rows, BLOCK_ROWS)
        kept = min(KEPT_BYTES, group * rows * tokens * size) * s.windows
        bias = block * tokens * ((group + 2) * size + 3)
        folded = 2 * block * s.heads * s.head_dim * size
        layer = 2 * s.kv_heads * tokens * s.head_dim
        repacked = layer * size if size < _SINGLE else 0
        scores = 0
        if s.softcap or s.backend == "reference":
            scores = 3 * block * s.heads * tokens * _SINGLE + layer * _SINGLE
        return kept + bias + folded + repacked + scores

    def _probe(self, tokens: int, rows: int) -> int:
        """The larger of what sums of attention mass and of deviations take."""
        s = self._shapes
        deviation = 4 * rows * s.kv_heads * s.head_dim * _SINGLE
        if s.backend == "triton":
            blocks = -(-tokens // _MASS_KEYS)
            return 3 * s.heads * min(rows, _MASS_ROWS) * blocks * _SINGLE + (s.kv_heads + 2) * tokens * _SINGLE
        single = s.kv_heads * tokens * s.head_dim * _SINGLE if s.dtype.itemsize < _SINGLE else 0
        mass = min(rows, MASKED_ROWS) * tokens * (2 * s.heads * _SINGLE + 3) + single + 2 * tokens * _SINGLE
        return max(mass, deviation)

    def _staging(self, layer: int) -> int:
        """Two layers of ``layer`` numbers: one is placed while the next arrives. In plain torch also in float32."""
        s = self._shapes
        if not s.staged:
            return 0
        converted = 0 if s.backend == "triton" else 5 * layer // 2 * _SINGLE
        return 2 * layer * s.dtype.itemsize + converted

"""How much memory a prefill takes: the canvas, and on top of it one layer of fresh activations, slice by slice.

What follows the prompt's length is small beside the canvas: masks, one layer of chunks on their way to a device, the
scores of a selector, the sensitivity of its tokens. Everything else is bounded by the rows of one slice. The numbers
are upper bounds, near the truth: ``tests/recompute/test_scratch.py`` holds them against what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from blend.model.decoder import Decoder
from blend.model.wide import computes_in
from blend.recompute.attention import BLOCK_ROWS, CONVERTED_ROWS, KEPT_BYTES, MERGED_ROWS, matrix_units
from blend.recompute.kernels import cpu
from blend.recompute.kernels.batch import WAVES
from blend.recompute.kernels.dispatch import Backend
from blend.recompute.mass import mass_rows

_SINGLE = 4
"""Bytes of a float32."""

_PER_TOKEN = 96
"""Bytes of a token's id, position and place in the masks that describe a prompt and in the selectors' sums."""

_TURNS = 20
"""Bytes of a token for each number of a head's key: cosines and sines that moved keys turn by, of two rotary kinds, and
float64 while they are made."""

_TILE_ROWS = 128
"""Most rows of a tile of Triton's attention."""

_MASS_ROWS, _MASS_KEYS = 512, 64
"""Rows of a round of Triton's mass, and the keys that one of its programs reads."""


@dataclass(frozen=True)
class Need:
    """Bytes that a prefill takes at most.

    Attributes:
        canvas: KV of all layers and positions.
        prompt: token ids, positions, masks over them, and their sensitivity.
        activations: of one slice of rows in one layer.
        masks: what attention keeps of them from layer to layer.
        attention: scores, partial results and the like of one layer's attention.
        probe: how much more than that a selector's sums take, which are made at another time.
        staging: one layer of stored chunks on their way to the canvas.
        logits: of the last position.
    """

    canvas: int
    prompt: int
    activations: int
    masks: int
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
        experts: how many experts a row goes through, 1 where there are none.
        vocabulary: V.
        dtype: of weights and canvases.
        backend: of the kernels.
        windows: how many kinds of attention layers there are, each with masks of its own.
        softcap: whether attention bends its scores, and hence holds them.
        widened: whether linear layers convert rows and weights to float32.
        staged: whether stored chunks are copied before they are placed.
        gpu: whether it runs on one.
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
    experts: int = 1
    backend: Backend = "torch"
    windows: int = 1
    softcap: bool = False
    widened: bool = False
    staged: bool = False
    gpu: bool = False
    processors: int = 1

    @classmethod
    def of(cls, decoder: Decoder) -> Shapes:
        """Those of a decoder."""
        config: Any = decoder.model.config.get_text_config(decoder=True)

        def of(name: str) -> int:
            return getattr(config, name, None) or 0

        dense, experts = of("intermediate_size") or 4 * config.hidden_size, of("num_experts_per_tok") or 1
        expert = of("moe_intermediate_size") or dense
        shared = expert * (of("num_shared_experts") or of("n_shared_experts"))
        device, backend = decoder.device, decoder.kernels.backend
        gpu = device.type == "cuda"
        return cls(
            layers=decoder.layers,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            hidden=config.hidden_size,
            intermediate=max(dense, experts * expert, shared, of("shared_expert_intermediate_size")),
            experts=experts,
            vocabulary=decoder.vocab_size,
            dtype=decoder.dtype,
            backend=backend,
            windows=len(set(getattr(config, "layer_types", None) or ("full_attention",))),
            softcap=getattr(config, "attn_logit_softcapping", None) is not None,
            widened=not gpu and not computes_in(decoder.dtype, device),
            staged=backend != "torch" or not cpu.supports(decoder.dtype, device),
            gpu=gpu,
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
        masks, attention = self._attention(tokens, slice_)
        return Need(
            canvas=shapes.layers * layer * size,
            prompt=tokens * (_PER_TOKEN + shapes.layers * _SINGLE + shapes.head_dim * _TURNS),
            activations=self._activations(slice_),
            masks=masks,
            attention=attention,
            probe=max(0, self._probe(tokens, slice_) - attention),
            staging=self._staging(layer),
            logits=shapes.vocabulary * (size + _SINGLE),
        )

    def _activations(self, rows: int) -> int:
        """The largest of what the two halves of a layer hold, and what its norms do where they compute in float32."""
        s, size = self._shapes, self._shapes.dtype.itemsize
        query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = (2 * s.hidden + 5 * query + 4 * key) * size
        mlp = (3 * s.hidden + 4 * s.intermediate) * size  # both halves of a gated one in one tensor, or two
        if s.experts > 1:
            mlp += 2 * s.experts * s.hidden * size
        norm = 2 * s.hidden * size + 3 * s.hidden * _SINGLE
        weights = 0
        if s.widened:
            widest = max(query + 2 * key, s.intermediate)
            mlp += (s.hidden + widest) * _SINGLE
            weights = s.hidden * widest * _SINGLE
        return rows * max(attention, mlp, norm) + weights

    def _attention(self, tokens: int, rows: int) -> tuple[int, int]:
        """What attention keeps from layer to layer, masks that is, and what it holds only while it computes one."""
        s, size = self._shapes, self._shapes.dtype.itemsize
        query, layer = s.heads * s.head_dim, 2 * s.kv_heads * tokens * s.head_dim
        if s.backend == "triton":
            # A tile is split into no more than 4/3 of the parts that keep all processors busy; float32 and a weight.
            parts = -(-4 * WAVES * s.processors // 3) + s.kv_heads
            return 0, parts * _TILE_ROWS * (s.head_dim + 1) * _SINGLE + rows * query * size
        group, block = s.heads // s.kv_heads, min(rows, BLOCK_ROWS)
        bends = s.softcap or s.backend == "reference"
        number = _SINGLE if bends else size
        masks = group * rows * tokens * number
        bias = block * tokens * (2 + number * (1 if masks <= KEPT_BYTES else 1 + group))
        held = bias + 3 * min(rows, MERGED_ROWS) * query * max(size, number)
        converted = not (bends or s.gpu) and rows >= CONVERTED_ROWS and not matrix_units()
        if size < _SINGLE:
            held += layer * (_SINGLE if bends or converted else size)  # keys and values in another form
            held += 2 * rows * query * _SINGLE if converted else 0
        if bends or s.gpu:
            held += 2 * block * s.heads * tokens * _SINGLE
        if s.backend == "reference":
            held += 2 * rows * query * _SINGLE
        return min(KEPT_BYTES, masks) * s.windows, held

    def _probe(self, tokens: int, rows: int) -> int:
        """The larger of what sums of attention mass and of deviations take."""
        s = self._shapes
        if s.backend == "triton":
            weights = s.heads * min(rows, _MASS_ROWS) * -(-tokens // _MASS_KEYS)
            return (3 * weights + (s.kv_heads + 2) * tokens) * _SINGLE
        deviation = 4 * rows * s.kv_heads * s.head_dim * _SINGLE
        group = s.heads // s.kv_heads
        block = min(rows, mass_rows(group, tokens))
        mass = block * (2 * group * _SINGLE + 3) * tokens + 2 * tokens * _SINGLE
        mass += rows * s.heads * s.head_dim * s.dtype.itemsize
        if s.dtype.itemsize < _SINGLE:
            mass += tokens * s.head_dim * _SINGLE
        return max(mass, deviation)

    def _staging(self, layer: int) -> int:
        """Two layers of ``layer`` numbers: one is placed while the next arrives. In plain torch also in float32."""
        s = self._shapes
        if not s.staged:
            return 0
        converted = 0 if s.backend == "triton" else 5 * layer // 2 * _SINGLE
        return 2 * layer * s.dtype.itemsize + converted

"""A transformers decoder that runs any rows of any requests in one forward pass.

The seam is one attention function, registered with transformers' attention interface. A pass gives the model all
rows side by side in a batch of one; in every layer that function writes the fresh K and V of each request's rows
into its canvas and lets each row attend to its own canvas, up to its own position, by the kernels that were chosen
for the decoder. What a pass works on reaches the function through a context variable, so models need not pass
anything on.

``blend.model`` imports ``blend.recompute.canvas``, ``kernels`` and ``rope``, against the usual direction: those hold
pure tensor code that imports nothing of models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from blend.errors import InvalidInput, ModelError, ModelUnsupported
from blend.model.rotary import PROBE_TOKENS, find_rotations
from blend.model.rows import LayerAttention, Observer, Rows, StopForward
from blend.model.shards import ALONE, Shards
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Choice, Kernels, kernels_for
from blend.recompute.kernels.memory import Canvases

__all__ = ["ATTENTION", "FAULTS", "Decoder", "LayerAttention", "Observer", "Rows", "StopForward", "rows_attention"]

ATTENTION = "blend_rows"
"""Name of the registered attention function."""

FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What model code raises when it is used in a way that it was not written for."""

_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
_HARMLESS = frozenset(
    (
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    )
)
"""Arguments that models hand on to their attention function and that do not change its result."""


class Decoder:
    """Runs rows through ``model``.

    Switches the model to this module's attention function and to evaluation, and finds out how its keys turn with
    position (the position self-test of :mod:`blend.model.rotary`). Whether the whole model is computed exactly is
    for :func:`blend.model.support.check` to say.

    Args:
        model: a transformers model on its device. It is changed: call it through the decoder from now on.
        kernels: which version of the kernels runs, see :func:`blend.recompute.kernels.dispatch.kernels_for`.

    Attributes:
        model: the transformers model.
        name: what errors call it.
        layers, heads, kv_heads, head_dim: L, H, KVH and D; the heads are those of this shard.
        shards: those who share the model's heads; natively this decoder alone.
        vocab_size, max_positions: tokens, and positions of the model's context.
        dtype, device: of weights and canvases.
        kernels: what passes and selectors compute with.
        rotations: for each layer how its keys turn, ``None`` where they don't; layers that turn alike share one
            object.

    Raises:
        InvalidInput: kernels that do not run here.
        ModelUnsupported: attention or positions of a kind that rows cannot express.
    """

    shards: Shards = ALONE

    def __init__(self, model: PreTrainedModel, kernels: Choice = "auto") -> None:
        config: Any = model.config.get_text_config(decoder=True)
        self.model = model.requires_grad_(False)
        model.train(False)
        self.name = str(model.config.name_or_path or type(model).__name__)
        self._refuse_by_configuration(config)
        try:
            self.layers: int = config.num_hidden_layers
            self.heads: int = config.num_attention_heads
            self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
            self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        except RuntimeError as error:  # transformers' answer where layers differ in what is asked for
            raise ModelUnsupported(self.name, f"layers of different sizes: {error}") from error
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.kernels = kernels_for(self.new_canvas(1).k, kernels)
        model.set_attn_implementation(ATTENTION)
        self.rotations = find_rotations(model, self.name, self.max_positions, self._probe)

    def new_canvas(self, length: int) -> Canvas:
        """A canvas of zeros for ``length`` positions of this model."""
        return Canvas(self.layers, self.kv_heads, length, self.head_dim, self.dtype, self.device)

    def with_kernels(self, kernels: Kernels) -> Decoder:
        """Return a decoder of the same model that computes with other kernels; this one stays as it is."""
        other = copy(self)
        other.kernels = kernels
        return other

    def forward(self, batch: Sequence[Rows], keep: Literal["last", "all"] = "last") -> Tensor | None:
        """Computes all rows of ``batch``, writing their K and V into their canvases.

        Returns logits in float32: ``[len(batch), V]``, of each request's last row, or with ``keep="all"``
        ``[rows, V]``, of all rows one after another; ``None`` if an observer stopped the pass. Each request gets
        what it would get alone. The result is an inference tensor: no gradients, no writing outside inference mode.

        Raises:
            InvalidInput: no rows, one canvas twice, a token or a canvas that is not this model's.
            ModelUnsupported: attention of a kind that rows cannot express.
        """
        return self._run(batch, [rows.positions for rows in batch], keep)

    @property
    def linear_flops_per_row(self) -> float:
        """Floating-point operations of one row outside attention: two for each parameter that is no embedding."""
        model: Any = self.model
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        skipped = {id(p) for module in embeddings if module is not None for p in module.parameters()}
        return float(2 * sum(p.numel() for p in model.parameters() if id(p) not in skipped))

    @torch.inference_mode()
    def _run(self, batch: Sequence[Rows], positions: Sequence[Tensor], keep: Literal["last", "all"]) -> Tensor | None:
        """:meth:`forward`, where the model is told ``positions`` and the canvases are used at the rows' own."""
        self._check(batch, keep)
        lengths = torch.tensor([len(rows) for rows in batch], device=self.device)
        token_ids = torch.cat([rows.token_ids.to(self.device) for rows in batch])
        where = torch.cat([at.to(self.device) for at in positions])
        with _running_pass(_Pass(self, batch)) as running:
            try:
                logits = self._logits(token_ids, where, lengths.cumsum(0) - 1 if keep == "last" else None)
            except StopForward:
                return None
        if running.next_layer != self.layers:
            raise ModelUnsupported(
                self.name,
                f"only {running.next_layer} of {self.layers} layers ask for attention through transformers' attention "
                "interface; state-space, convolution and hand-written attention layers cannot be reused",
            )
        return logits.float()

    def _logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor | None) -> Tensor:
        """Calls the model on ``[R]`` tokens at ``[R]`` positions; logits of the ``kept`` rows, of all for ``None``."""
        out = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
            logits_to_keep=0 if kept is None else kept,
        )
        logits: Tensor = out.logits[0]
        return logits

    def _check(self, batch: Sequence[Rows], keep: str) -> None:
        if not batch:
            raise InvalidInput("batch", "no rows", "rows of one or more requests")
        if keep not in ("last", "all"):
            raise InvalidInput("keep", keep, "last or all")
        if len({id(rows.canvas) for rows in batch}) != len(batch):
            raise InvalidInput("batch", "one canvas more than once", "rows of different canvases")
        fits = (self.layers, self.kv_heads, self.head_dim, self.dtype)
        for rows in batch:
            k = rows.canvas.k
            if (k.shape[0], k.shape[1], k.shape[3], k.dtype) != fits:
                raise InvalidInput("canvas", rows.canvas, "a canvas of this decoder, from new_canvas")
        tokens = [rows.token_ids.cpu().numpy() for rows in batch]
        low, high = min(int(ids.min()) for ids in tokens), max(int(ids.max()) for ids in tokens)
        if low < 0 or high >= self.vocab_size:
            raise InvalidInput("token_ids", low if low < 0 else high, f"0 to {self.vocab_size - 1}")

    def _refuse_by_configuration(self, config: Any) -> None:
        def refuse(reason: str) -> None:
            raise ModelUnsupported(self.name, reason)

        if config is not self.model.config:
            refuse("wraps a text model among other modalities; load the text model by itself")
        if getattr(config, "kv_lora_rank", None):
            refuse("latent attention (MLA) keeps no keys per head that could be moved")
        if not getattr(config, "num_attention_heads", None):
            refuse("no attention heads in its configuration: a state-space model keeps no keys")
        if (getattr(config, "max_position_embeddings", None) or 0) < 1:
            refuse("its configuration names no context length (max_position_embeddings)")
        if (getattr(config, "num_hidden_layers", None) or 0) < 1:
            refuse("its configuration names no layers (num_hidden_layers)")
        unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if unknown:
            refuse(f"layers of type {', '.join(sorted(unknown))}; known: {', '.join(sorted(_LAYER_TYPES))}")
        missing = {"position_ids", "logits_to_keep"} - set(inspect.signature(self.model.forward).parameters)
        if missing:
            refuse(f"its forward pass takes no {' and no '.join(sorted(missing))}")

    def _probe(self, starts: Sequence[int]) -> list[Tensor]:
        """The probe of :func:`find_rotations`: canvases stay short, only the model is told other positions."""
        slots = torch.arange(PROBE_TOKENS, device=self.device)
        tokens = (slots * 7919 + 17) % self.vocab_size
        batch = [Rows(self.new_canvas(PROBE_TOKENS), slots, tokens) for _ in starts]
        try:
            self._run(batch, [slots + start for start in starts], "last")
        except FAULTS as error:
            raise ModelUnsupported(self.name, f"its forward pass fails on rows: {error}") from error
        return [rows.canvas.k for rows in batch]


class _Pass:
    """One forward pass: whose rows lie where along the sequence axis, and which layer comes next."""

    def __init__(self, decoder: Decoder, requests: Sequence[Rows]) -> None:
        self.decoder = decoder
        self.requests = requests
        self.memory = Canvases([rows.canvas.k for rows in requests], [rows.canvas.v for rows in requests])
        self.batch = Batch([r.at for r in requests], [r.visible for r in requests], device=decoder.device)
        self.observed = [
            (rows.observer, rows, slice(start, stop))
            for rows, (start, stop) in zip(requests, pairwise(self.batch.starts), strict=True)
            if rows.observer is not None
        ]
        self.next_layer = 0
        self._lates: dict[int, tuple[Canvases, Batch]] = {}

    def layer(self, index: int | None, q: Tensor, k: Tensor, v: Tensor, attention: LayerAttention) -> Tensor:
        """Attention of one layer for all rows: ``[rows, H, D]`` from ``[heads, rows, D]`` each."""
        self._check(index, q, k, v)
        layer, kernels = self.next_layer, self.decoder.kernels
        for rows in self.requests:
            rows.canvas.need(layer)
        for observer, rows, own in self.observed:
            observer.before_write(layer, rows, q[:, own], k[:, own], v[:, own], attention)
        kernels.commit(k, v, self.memory, layer, self.batch)
        out = None
        for observer, rows, own in self.observed:
            out = observer.after_write(layer, rows, q[:, own], k[:, own], v[:, own], attention)
        if out is None or len(self.requests) > 1:
            out = kernels.attend(
                q,
                self.memory,
                layer,
                self.batch,
                scale=attention.scale,
                window=attention.window,
                softcap=attention.softcap,
            )
        for observer, rows, own in self.observed:
            if late := observer.after_attention(layer, rows):
                again = slice(own.stop - late, own.stop)
                out[:, again] = self._once_more(rows, late, q[:, again], attention)
        self.next_layer += 1
        return out.transpose(0, 1).contiguous()

    def _once_more(self, rows: Rows, late: int, query: Tensor, attention: LayerAttention) -> Tensor:
        """Attention of a request's last rows over what its canvas holds now."""
        memory, batch = self._late(rows, late)
        return self.decoder.kernels.attend(
            query,
            memory,
            self.next_layer,
            batch,
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
        )

    def _late(self, rows: Rows, late: int) -> tuple[Canvases, Batch]:
        if id(rows) not in self._lates:
            memory = Canvases([rows.canvas.k], [rows.canvas.v])
            self._lates[id(rows)] = memory, Batch([rows.at[-late:]], [rows.visible], device=self.decoder.device)
        return self._lates[id(rows)]

    def _check(self, layer: int | None, query: Tensor, key: Tensor, value: Tensor) -> None:
        decoder = self.decoder
        if layer != self.next_layer or self.next_layer >= decoder.layers:
            raise ModelUnsupported(
                decoder.name, f"attention of layer {layer} where layer {self.next_layer} of {decoder.layers} is next"
            )
        rows, dims = self.batch.rows, decoder.head_dim
        expected = (decoder.heads, rows, dims), (decoder.kv_heads, rows, dims), (decoder.kv_heads, rows, dims)
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        if shapes != expected:
            raise ModelUnsupported(
                decoder.name, f"query, key and value of layer {layer} have shapes {shapes}, not {expected}"
            )
        if {key.dtype, value.dtype} != {decoder.dtype}:
            raise ModelUnsupported(
                decoder.name, f"key and value of layer {layer} are {key.dtype} and {value.dtype}, not {decoder.dtype}"
            )


_running: ContextVar[_Pass | None] = ContextVar("blend_running_pass", default=None)


@contextmanager
def _running_pass(running: _Pass) -> Iterator[_Pass]:
    token = _running.set(running)
    try:
        yield running
    finally:
        _running.reset(token)


def rows_attention(
    layer: int | None, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
) -> Tensor | None:
    """Attention of one layer of the pass that runs in this context; ``None`` where none does.

    For model code that is not transformers' own: it calls this in place of its attention, layer after layer.

    Args:
        layer: the layer's index, which must be the next one's.
        query, key, value: ``[H, R, D]`` and twice ``[KVH, R, D]``, turned to their positions.
        attention: what this layer asks of attention.

    Returns:
        ``[R, H, D]``, contiguous.

    Raises:
        ModelUnsupported: another layer than the next one, or tensors that are not this model's.
    """
    running = _running.get()
    return None if running is None else running.layer(layer, query, key, value, attention)


def _rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered attention function. Refuses every argument whose meaning it does not know."""
    running = _running.get()
    if running is None:
        raise ModelError(type(module).__name__, "this model runs rows: call Decoder.forward, not the model itself")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ModelUnsupported(running.decoder.name, f"attention with {', '.join(unknown)}, which rows cannot express")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    index, wanted = getattr(module, "layer_idx", None), LayerAttention(scale, sliding_window, softcap)
    return running.layer(index, query[0], key[0], value[0], wanted)[None], None


def _no_mask(*_: object, **__: object) -> None:
    """Rows know what they see: transformers need not make a mask."""


AttentionInterface.register(ATTENTION, _rows_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)

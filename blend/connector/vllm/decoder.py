"""vLLM's own model as a decoder of rows: the same weights, used on canvases of blend's.

A pass calls the model outside of its compiled graph and without attention metadata, as vLLM's own profiling run does:
no block of the paged cache is then read or written. Forward hooks on the attention layers give each layer's attention
over the canvases instead. So selectors, and the encoding of chunks, work on this model as on the native engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from blend.connector.vllm.ranks import shards
from blend.connector.vllm.tasks import checkpoint
from blend.errors import ModelUnsupported
from blend.model.decoder import Decoder, LayerAttention, rows_attention
from blend.model.embedded import quiet_loading
from blend.model.rotary import find_rotations
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import Choice, kernels_for


class EngineDecoder(Decoder):
    """Runs rows through a model that vLLM has loaded.

    Args:
        model: vLLM's model.
        attention: its attention layers, first layer first.
        config: vLLM's configuration.
        skeleton: the transformers model of the same directory without weights: see :func:`skeleton_of`.
        kernels: which version of the kernels runs on canvases.

    Raises:
        ModelUnsupported: attention or positions of a kind that rows cannot express.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, Attention],
        config: VllmConfig,
        skeleton: Any,
        kernels: Choice = "auto",
    ) -> None:
        # The base class reads all of this from a transformers model. Here the engine's own layers say it.
        text = skeleton.config.get_text_config(decoder=True)
        self.engine_model: Any = model
        self.name = str(config.model_config.model)
        self._config = config
        self._attention = tuple(attention.values())
        self._passes = 0
        self._handles: list[RemovableHandle] = []
        first = self._attention[0]
        self.layers = len(self._attention)
        self.shards = shards()
        self.heads, self.kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_size
        self.asked = tuple(_asked(self.name, layer, first) for layer in self._attention)
        self.vocab_size = text.vocab_size
        self.max_positions = min(text.max_position_embeddings, config.model_config.max_model_len)
        self.dtype = config.model_config.dtype
        parameter = next(model.parameters())
        self.device = parameter.device
        self.kernels = kernels_for(Canvas(1, 1, 1, self.head_dim, self.dtype, self.device).k, kernels)
        self.rotations = find_rotations(skeleton, self.name, self.max_positions, self._probe)

    @property
    def linear_flops_per_row(self) -> float:
        """Floating-point operations of one row outside attention: two for each parameter that is no embedding."""
        return float(2 * sum(p.numel() for name, p in self.engine_model.named_parameters() if not _embeds(name)))

    def _logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor | None) -> Tensor:
        # Without metadata the engine's attention computes nothing and leaves the paged cache alone.
        context = set_forward_context(None, self._config, num_tokens=len(token_ids), skip_compiled=True)
        with context, self._on_canvases():
            hidden = self.engine_model(input_ids=token_ids, positions=positions)
        if isinstance(hidden, tuple):
            hidden = hidden[0]
        logits: Tensor = self.engine_model.compute_logits(hidden if kept is None else hidden[kept])
        return logits

    @contextmanager
    def _on_canvases(self) -> Iterator[None]:
        """Have the attention layers work on the pass's canvases inside the ``with`` block, and only there.

        Passes overlap where one stands still while another runs; the layers have their hooks once all the same.
        """
        if self._passes == 0:
            self._handles = [
                layer.register_forward_hook(self._hook(index), with_kwargs=True)
                for index, layer in enumerate(self._attention)
            ]
        self._passes += 1
        try:
            yield
        finally:
            self._passes -= 1
            if self._passes == 0:
                for handle in self._handles:
                    handle.remove()

    def _hook(self, index: int) -> Any:
        def attend(layer: Attention, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            names = ("query", "key", "value")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            q, k, v = (
                given[name].view(-1, heads, self.head_dim).transpose(0, 1)
                for name, heads in zip(names, (self.heads, self.kv_heads, self.kv_heads), strict=True)
            )
            found = rows_attention(index, q, k, v, self.asked[index])
            if found is None:  # the engine's own pass, while this one stands still
                return out
            checkpoint(q.shape[1])
            return found.view(out.shape)

        return attend


def skeleton_of(directory: Path) -> Any:
    """The transformers model of a directory with real buffers, its frequencies among them, and no weights.

    Raises:
        ModelUnsupported: transformers has no such model.
    """
    try:
        with quiet_loading(), init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, ImportError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(str(directory), f"transformers does not know it: {error}") from error


def _asked(name: str, layer: Attention, first: Attention) -> LayerAttention:
    """What a layer asks of attention.

    Raises:
        ModelUnsupported: something that rows over a canvas cannot express.
    """
    sizes = ("num_heads", "num_kv_heads", "head_size", "head_size_v")
    if layer.head_size_v != layer.head_size or any(getattr(layer, s) != getattr(first, s) for s in sizes):
        raise ModelUnsupported(name, "attention layers of different sizes")
    if layer.kv_sharing_target_layer_name is not None:
        raise ModelUnsupported(name, "layers that share their keys and values with others")
    if layer.has_sink or getattr(layer.impl, "alibi_slopes", None) is not None:
        raise ModelUnsupported(name, "attention with sinks or slopes of its own")
    softcap = getattr(layer.impl, "logits_soft_cap", None) or None
    return LayerAttention(float(layer.impl.scale), layer.sliding_window, softcap)


def _embeds(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name

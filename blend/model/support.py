"""Whether a model is computed exactly: a small random copy of it is run both ways.

Attention sinks, masks of an unknown kind or a temperature that follows the position leave the keys as they should
be and still give other logits. So the copy's logits through rows, whole and in parts, are compared with those of
stock eager attention.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from blend.errors import ModelUnsupported
from blend.model.decoder import FAULTS, Decoder, Rows

TOKENS = 64
WINDOW = 8
"""What sliding windows and attention chunks shrink to in the copy, so that 64 tokens reach past them."""

_TOLERANCE = 1e-4
_VOCABULARY = 128
_LEAST_LAYERS = 4
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size", "attention_window_size", "window_size")
_AT_MOST = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def check(decoder: Decoder) -> None:
    """Compares whole-model logits of a small random copy of the decoder's model with stock eager attention.

    The copy keeps the configuration, every type of layer, head size and rotation, in float32 on the CPU; width,
    depth, vocabulary, windows and chunks are small. Full, two-pass and scattered rows, and three requests in one
    pass, must give the stock logits of 64 tokens. Takes some tenths of a second, leaves random state alone.

    Raises:
        ModelUnsupported: logits that differ, or a model that cannot be made small.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        tokens = torch.randint(3, _VOCABULARY, (TOKENS,))
        try:
            model = _small_copy(decoder)
            with torch.inference_mode():
                stock = model(input_ids=tokens[None], use_cache=False).logits[0]
        except FAULTS as error:
            raise ModelUnsupported(decoder.name, f"no small copy of it can be built and run: {error}") from error
        _compare(Decoder(model), tokens, stock, decoder.name)


def _compare(small: Decoder, tokens: Tensor, stock: Tensor, name: str) -> None:
    everything = torch.arange(TOKENS)
    cut = TOKENS * 2 // 3
    scattered = torch.cat((torch.randperm(TOKENS - 1)[: TOKENS // 4].sort().values, everything[-1:]))

    whole = Rows(small.new_canvas(TOKENS), everything, tokens)
    _expect("full", small.forward([whole], keep="all"), stock, name)

    halves = small.new_canvas(TOKENS)
    small.forward([Rows(halves, everything[:cut], tokens[:cut])])
    second = Rows(halves, everything[cut:], tokens[cut:])
    _expect("two-pass", small.forward([second], keep="all"), stock[cut:], name)

    # The whole pass left its canvas filled; what the scattered rows replace must be replaced for it to come right.
    for stored in (whole.canvas.k, whole.canvas.v):
        stored[:, :, scattered] = torch.randn_like(stored[:, :, scattered])
    repaired = Rows(whole.canvas, scattered, tokens[scattered])
    _expect("scattered", small.forward([repaired], keep="all"), stock[scattered], name)

    one = Rows(halves, everything[-1:], tokens[-1:])
    fresh = Rows(small.new_canvas(TOKENS), everything, tokens)
    together = torch.cat((stock[scattered], stock, stock[-1:]))
    _expect("side by side", small.forward([repaired, fresh, one], keep="all"), together, name)


def _expect(what: str, logits: Tensor | None, stock: Tensor, name: str) -> None:
    size = max(1.0, float(stock.abs().max()))
    difference = float("inf") if logits is None else float((logits - stock).abs().max())
    if not difference <= _TOLERANCE * size:
        raise ModelUnsupported(
            name,
            f"{what} rows give other logits than stock eager attention on a small random copy "
            f"(largest difference {difference:.1e} of {size:.1e})",
        )


def _small_copy(decoder: Decoder) -> Any:
    """A random model of the decoder's class, in float32 with stock eager attention."""
    model: Any = type(decoder.model)(_small_config(decoder))
    model.to(torch.float32)
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights as initialised make nearly uniform attention, which hides sinks, soft-caps and masks.
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _small_config(decoder: Decoder) -> Any:
    config: Any = copy.deepcopy(decoder.model.config)
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    layers = _few_layers(config, decoder.layers)
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == decoder.layers:
            setattr(config, name, type(value)(value[:layers]))
    kv_heads = min(decoder.kv_heads, 2)
    heads = kv_heads * min(decoder.heads // decoder.kv_heads, 2)
    config.num_hidden_layers = layers
    config.num_attention_heads = heads
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = kv_heads
    config.hidden_size = heads * decoder.head_dim
    config.vocab_size = _VOCABULARY
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    for name, most in (*_AT_MOST.items(), *((window, WINDOW) for window in _WINDOWS)):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    return config


def _few_layers(config: Any, layers: int) -> int:
    """The fewest first layers that hold every kind of layer, by what the configuration lists for each layer."""
    listed = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == layers]
    kinds = [tuple(map(repr, kind)) for kind in zip(*listed, strict=True)]
    return min(layers, max([_LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))]))

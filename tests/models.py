"""Tiny random models, one builder a family: ``build("llama")`` gives the same weights each time."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from transformers.modeling_utils import PreTrainedModel

VOCABULARY = 128
WINDOW = 12

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {"head_dim": 16}
_NO_GQA = {"num_key_value_heads": None}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
_SHORT, _LONG = [1.0] * 8, [4.0] * 8
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}

SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", _LLAMA3),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", _WIDE),
    "gemma": ("Gemma", _WIDE),
    "gemma2": ("Gemma2", {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3", {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-partial": ("Phi3", _rope("default", partial_rotary_factor=0.5)),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "smollm3": ("SmolLM3", {}),
    "cohere": ("Cohere", {}),
    "gpt-neox": ("GPTNeoX", {**_rope("default", partial_rotary_factor=0.5), **_NO_GQA}),
    "nanochat": ("NanoChat", {}),
    "exaone4": ("Exaone4", {"sliding_window": WINDOW}),
    "afmoe": ("Afmoe", {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
}
"""Family → transformers class prefix and what its configuration changes: models that run exactly."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2", _NO_GQA, "absolute positions"),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=2.0), "total length"),
    "phi3-longrope": (
        "Phi3",
        {**_rope("longrope", short_factor=_SHORT, long_factor=_LONG), "original_max_position_embeddings": 128},
        "total length",
    ),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": WINDOW}, "s_aux"),
    "llama4": ("Llama4", {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}, "chunked_attention"),
    "deepseek-v2": ("DeepseekV2", _MLA, "latent attention"),
    "deepseek-v3": ("DeepseekV3", _MLA, "latent attention"),
    "mamba": ("Mamba", {}, "linear_attention"),
    "rwkv": ("Rwkv", {}, "takes no position_ids"),
    "gptj": ("GPTJ", _NO_GQA, "fails on rows"),
    "opt": ("OPT", _NO_GQA, "absolute positions"),
    "bloom": ("Bloom", {}, "takes no position_ids"),
    "falcon": ("Falcon", {}, "only 0 of 4 layers"),
    "bert": ("Bert", {}, "is_causal=False"),
    "hunyuan": ("HunYuanDenseV1", _WIDE, "turned by frequencies"),
}
"""The same, with a part of the reason: models that are refused."""

_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
_MODELS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel"}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A model of ``family`` in float32 with random weights large enough for pointed attention."""
    prefix, own = SUPPORTED[family] if family in SUPPORTED else REFUSED[family][:2]
    config_class = getattr(hf, _CONFIGS.get(prefix, prefix + "Config"))
    model_class = getattr(hf, _MODELS.get(prefix, prefix + "ForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = model_class(config_class(**{**_BASE, **own, **changes})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model

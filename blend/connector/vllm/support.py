"""Which vLLM, and which of its configurations, the connector works in."""

from __future__ import annotations

from typing import Any

import torch
from vllm import __version__ as VLLM  # noqa: N812 - a constant
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

TRIED = ("0.32",)
"""Versions of vLLM that the connector's tests run in."""


def refusal(config: VllmConfig, cache: KVCacheConfig | None) -> str:
    """Return why nothing can be blended in an engine of this configuration, or an empty string.

    What a configuration does not tell, the self-tests at start-up find out.
    """
    model, parallel = config.model_config, config.parallel_config
    version = ".".join(VLLM.split("+")[0].split(".")[:2])
    reasons: list[tuple[bool, str]] = [
        (version not in TRIED, f"vLLM {VLLM}; the connector is made for {', '.join(TRIED)}"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (parallel.data_parallel_size > 1, "data parallelism"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism"),
        (parallel.decode_context_parallel_size > 1, "context parallelism"),
        (model.use_mla, "latent attention (MLA)"),
        (model.is_multimodal_model, "a model of several modalities"),
        (model.is_encoder_decoder, "an encoder-decoder model"),
        (model.runner_type != "generate", f"a {model.runner_type} model"),
        (model.quantization is not None, f"quantized weights ({model.quantization})"),
        (model.dtype not in (torch.float32, torch.bfloat16, torch.float16), f"weights in {model.dtype}"),
        (config.cache_config.cache_dtype not in ("auto", *_names(model.dtype)), "a quantized KV cache"),
        (config.speculative_config is not None, "speculative decoding"),
        (cache is not None and _other_cache(cache), "a KV cache of several groups or of another kind than attention's"),
    ]
    return next((reason for holds, reason in reasons if holds), "")


def _names(dtype: Any) -> tuple[str, ...]:
    return (str(dtype).removeprefix("torch."),)


def _other_cache(cache: KVCacheConfig) -> bool:
    # Where all layers have windows, the engine gives blocks for the last window alone. It promotes a mixture.
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec)

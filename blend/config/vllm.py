"""vLLM in place of the native engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blend.config.checks import at_least
from blend.errors import InvalidConfig


@dataclass(frozen=True)
class VllmEngineConfig:
    """What vLLM is given, where a service has it generate in place of the native engine.

    Model, dtype, sink, kernels and store are :class:`EngineConfig`'s.

    Args:
        max_model_len: most tokens of a prompt and its answer; ``None`` means the model's context.
        kv_cache_bytes: memory of vLLM's paged KV cache; ``None`` means vLLM's own choice on a GPU, and 2 GiB on a CPU.
        args: further arguments of vLLM's engine (``AsyncEngineArgs``) by their names, such as
            ``{"enforce_eager": True}``. What the service decides itself, such as the model, is not to be named.
    """

    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            at_least("vllm.max_model_len", self.max_model_len, 1, "tokens")
        if self.kv_cache_bytes is not None:
            at_least("vllm.kv_cache_bytes", self.kv_cache_bytes, 1, "bytes")
        if not isinstance(self.args, Mapping) or not all(isinstance(name, str) for name in self.args):
            raise InvalidConfig("vllm.args", self.args, "an object: arguments of vLLM's engine by their names")

"""Starting vLLM with the connector inside, for a service.

vLLM reads some variables of the environment, a few of them when it is imported: :data:`ENVIRONMENT` holds those that
are set here where the environment does not set them, and vLLM is imported after that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from blend.config import ConnectorConfig, EngineConfig, GiB, VllmEngineConfig
from blend.connector.vllm.extension import EXTENSION
from blend.errors import InvalidConfig, ModelUnsupported

ENVIRONMENT = {
    # A forked engine would inherit this process's threads, and numba, with which it does not start.
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",  # a service tells nobody that it runs
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}

_OURS = (
    "dtype",
    "kv_cache_memory_bytes",
    "kv_transfer_config",
    "max_model_len",
    "model",
    "skip_tokenizer_init",
    "worker_extension_cls",
)
_CPU_KV_BYTES = 2 * GiB  # vLLM itself would want most of the machine's memory


def arguments(config: EngineConfig, vllm: VllmEngineConfig, directory: Path, secret: bytes) -> dict[str, Any]:
    """The arguments of vLLM's engine.

    Raises:
        InvalidConfig: one that is not to be given.
    """
    if taken := sorted(set(vllm.args).intersection(_OURS)):
        raise InvalidConfig("vllm.args", ", ".join(taken), f"none of {', '.join(_OURS)}")
    if (ranks := vllm.args.get("tensor_parallel_size", 1)) != 1:
        # Each rank's shard of a chunk has a key of its own, and a service forgets chunks by the first one's.
        raise InvalidConfig("vllm.args", f"tensor_parallel_size {ranks}", "one rank, in a service")
    settings = ConnectorConfig(
        model=config.model,
        sink=config.sink,
        kernels=config.kernels,
        capture_queue=ConnectorConfig.capture_queue if config.recompute_misses else 0,
        store=replace(config.store, secret=secret),
    )
    transfer = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "blend.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings.values(),
    }
    return {
        **vllm.args,
        "model": str(directory),
        "dtype": config.dtype,
        "max_model_len": vllm.max_model_len,
        "kv_cache_memory_bytes": vllm.kv_cache_bytes,
        "kv_transfer_config": transfer,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
    }


async def started(model: str, given: Mapping[str, Any]) -> Any:
    """Start vLLM on the running event loop.

    Raises:
        InvalidConfig: an argument that it does not have.
        ModelUnsupported: it does not start.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {field.name for field in fields(AsyncEngineArgs)}
    if unknown := sorted(set(given) - known):
        raise InvalidConfig("vllm.args", ", ".join(unknown), "arguments of vLLM's engine by their names")
    whole = {**given, "kv_transfer_config": KVTransferConfig(**given["kv_transfer_config"])}
    if whole["kv_cache_memory_bytes"] is None and current_platform.is_cpu():
        whole["kv_cache_memory_bytes"] = _CPU_KV_BYTES
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**whole))
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise ModelUnsupported(model, f"vLLM did not start: {error}") from error

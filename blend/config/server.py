"""The gRPC service."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from blend.config.checks import at_least, is_listening
from blend.config.engine import EngineConfig
from blend.config.operations import OperationsConfig
from blend.config.rag import RagConfig
from blend.config.security import SecurityConfig
from blend.config.units import MiB, cache_dir
from blend.config.vllm import VllmEngineConfig
from blend.errors import InvalidConfig

_LISTEN = (
    "a loopback address, such as 127.0.0.1; wider with TLS and an access file, or with insecure_listen "
    "(--insecure-listen) where everyone on the network may read, change and delete everything"
)
_METRICS_LISTEN = (
    "a loopback address, such as 127.0.0.1; wider with insecure_listen (--insecure-listen) where everyone on the "
    "network may read the figures of all tenants"
)


@dataclass(frozen=True)
class ServerConfig:
    """The gRPC service.

    Args:
        address: ``host:port`` to listen on; port 0 takes a free one.
        data_dir: catalog, index and stored KV of this service; ``None`` means ``cache_dir() / "server"``.
        max_queue: requests that may wait for the engine before new ones are refused.
        max_message_bytes: largest gRPC message.
        drain_seconds: how long a shutdown waits for running requests.
        security: who may call, and encryption. Without both, only an address of this machine is listened on.
        operations: metrics, logs and traces. Their page of metrics, which asks nobody who it is, is served beyond this
            machine only where ``security.insecure_listen`` is set.
        engine, rag: their own settings.
        vllm: has vLLM generate in place of the native engine; ``engine`` then holds what both have: model, dtype, sink,
            kernels and store. ``None`` means the native engine.

    Raises:
        InvalidConfig: a value is not allowed, or not with the others.
    """

    address: str = "127.0.0.1:50061"
    data_dir: str | Path | None = None
    max_queue: int = 64
    max_message_bytes: int = 16 * MiB
    drain_seconds: int = 20
    security: SecurityConfig = field(default_factory=SecurityConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rag: RagConfig = field(default_factory=RagConfig)
    vllm: VllmEngineConfig | None = None

    def __post_init__(self) -> None:
        if not is_listening(self.address):
            raise InvalidConfig("address", self.address, "host:port with a port from 0 to 65535")
        wide = self.security.insecure_listen
        if not (_stays_here(self.address) or self.security.closed or wide):
            raise InvalidConfig("address", self.address, _LISTEN)
        metrics = self.operations.metrics_address
        if metrics is not None and not (_stays_here(metrics) or wide):
            raise InvalidConfig("operations.metrics_address", metrics, _METRICS_LISTEN)
        at_least("max_queue", self.max_queue, 1, "requests")
        at_least("max_message_bytes", self.max_message_bytes, 1024, "bytes")
        at_least("drain_seconds", self.drain_seconds, 0, "seconds")
        if self.vllm is not None:
            if self.engine.device != "auto":
                raise InvalidConfig("device", self.engine.device, "auto with vLLM, which is built for one kind")
            if self.engine.threads is not None:
                raise InvalidConfig("threads", self.engine.threads, "none with vLLM, which reads OMP_NUM_THREADS")
            if self.engine.shadow.share > 0:
                raise InvalidConfig("shadow.share", self.engine.shadow.share, "0 with vLLM, where nothing is compared")
            if self.engine.shadow.max_kl is not None:
                raise InvalidConfig("shadow.max_kl", self.engine.shadow.max_kl, "none with vLLM, which is not compared")

    @property
    def path(self) -> Path:
        """The service's data directory."""
        return Path(self.data_dir).expanduser() if self.data_dir is not None else cache_dir() / "server"


def _stays_here(address: str) -> bool:
    return is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, which may be an address or a name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False

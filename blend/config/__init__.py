"""Every setting and its default, once. Wrong values fail at construction with :class:`InvalidConfig`."""

from __future__ import annotations

from blend.config.connector import ConnectorConfig
from blend.config.engine import KERNELS, MAX_THREADS, EngineConfig
from blend.config.mooncake import MOONCAKE_ADMIN_PORT, MOONCAKE_PROTOCOLS, MooncakeConfig
from blend.config.operations import LOG_FORMATS, LOG_LEVELS, OperationsConfig
from blend.config.rag import RagConfig
from blend.config.residency import MAX_NODE_NAME, RESIDENCY_LOOPBACK, ResidencyConfig, ResidencySource
from blend.config.security import SecurityConfig, TlsConfig
from blend.config.server import ServerConfig, is_loopback
from blend.config.shadow import ShadowConfig
from blend.config.store import MAX_TENANT, PREFETCH_POLICIES, WRITE_POLICIES, StoreConfig
from blend.config.units import GiB, MiB, cache_dir
from blend.config.vllm import VllmEngineConfig

__all__ = [
    "KERNELS",
    "LOG_FORMATS",
    "LOG_LEVELS",
    "MAX_NODE_NAME",
    "MAX_TENANT",
    "MAX_THREADS",
    "MOONCAKE_ADMIN_PORT",
    "MOONCAKE_PROTOCOLS",
    "PREFETCH_POLICIES",
    "RESIDENCY_LOOPBACK",
    "WRITE_POLICIES",
    "ConnectorConfig",
    "EngineConfig",
    "GiB",
    "MiB",
    "MooncakeConfig",
    "OperationsConfig",
    "RagConfig",
    "ResidencyConfig",
    "ResidencySource",
    "SecurityConfig",
    "ServerConfig",
    "ShadowConfig",
    "StoreConfig",
    "TlsConfig",
    "VllmEngineConfig",
    "cache_dir",
    "is_loopback",
]

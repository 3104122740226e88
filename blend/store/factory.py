"""From settings to a store."""

from __future__ import annotations

import os
from collections.abc import Callable

from blend.config import StoreConfig
from blend.store.base import Tier
from blend.store.buffers import Buffer
from blend.store.disk import DiskTier
from blend.store.host import HostTier
from blend.store.mooncake import mooncake_tier
from blend.store.policy import Policy
from blend.store.secret import SECRET_NBYTES, load_secret
from blend.store.terms import Terms
from blend.store.tiered import TieredStore


def open_store(config: StoreConfig, allocate: Callable[[int], Buffer] | None = None) -> tuple[TieredStore, bytes]:
    """Return the store that ``config`` describes, and the secret that keys its names.

    A store in memory alone needs no directory: unless it is given a secret, it draws one that lasts as long as it.

    Args:
        allocate: where the host tier's memory comes from (see :class:`HostTier`): pinned memory, where there is a GPU.

    Raises:
        TierUnavailable: the directory or the secret in it cannot be used.
    """
    terms = Terms(config.lease_seconds, config.high_watermark, config.low_watermark)
    tiers: list[Tier] = []
    if config.host_bytes:
        tiers.append(HostTier(config.host_bytes, terms=terms, allocate=allocate))
    if config.disk_bytes:
        tiers.append(DiskTier(config.path, config.disk_bytes, fsync=config.fsync, terms=terms))
    if config.mooncake is not None:
        tiers.append(mooncake_tier(config.mooncake))
    if config.secret is not None:
        secret = config.secret
    elif config.disk_bytes:
        secret = load_secret(config.path)
    else:
        secret = os.urandom(SECRET_NBYTES)
    policy = Policy(
        write=config.write_policy,
        write_hits=config.write_hits,
        write_retries=config.write_retries,
        prefetch=config.prefetch_policy,
        prefetch_base=config.prefetch_base_ms / 1e3,
        prefetch_per_ki_token=config.prefetch_ms_per_ki_token / 1e3,
        staging_bytes=config.staging_bytes,
        inflight_bytes=config.inflight_bytes,
    )
    return TieredStore(tiers, policy=policy), secret

"""From settings to a store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from blend.config import StoreConfig
from blend.errors import TierUnavailable
from blend.store.base import Tier
from blend.store.buffers import Buffer
from blend.store.disk import DiskTier
from blend.store.host import HostTier
from blend.store.mooncake import MooncakeTier, mooncake_tier
from blend.store.node import ResidencyNode
from blend.store.policy import Policy
from blend.store.residency import ResidencyObserver
from blend.store.secret import SECRET_NBYTES, load_secret
from blend.store.tenants import Quotas, Tenants
from blend.store.terms import Terms
from blend.store.tiered import TieredStore

_log = logging.getLogger(__name__)


def open_store(config: StoreConfig, allocate: Callable[[int], Buffer] | None = None) -> tuple[TieredStore, bytes]:
    """Return the store that ``config`` describes, and the secret that keys its names.

    A store in memory alone needs no directory: unless it is given a secret, it draws one that lasts as long as it.
    Where there is a Mooncake store, objects go between it and the host tier's memory without a copy.

    Args:
        allocate: where the host tier's memory comes from (see :class:`HostTier`): pinned memory, where there is a GPU.

    Raises:
        TierUnavailable: the directory, the secret in it, or an address for residency events cannot be used.
    """
    with ExitStack() as undo:
        residency = undo.enter_context(ResidencyNode(config.residency)) if config.residency is not None else None
        observer = residency.publisher if residency is not None else None
        secret = store_secret(config)
        known = Tenants(secret)
        quotas = known.quotas(config.tenant_quota_bytes, config.tenant_quotas)
        tiers = [undo.enter_context(tier) for tier in _tiers(config, allocate, observer, quotas)]
        store = TieredStore(tiers, policy=_policy(config), residency=residency, known=known)
        undo.callback(store.close)
        if residency is not None:
            residency.follow(next((tier for tier in tiers if isinstance(tier, MooncakeTier)), None))
        undo.pop_all()
    return store, secret


def _tiers(
    config: StoreConfig,
    allocate: Callable[[int], Buffer] | None,
    observer: ResidencyObserver | None,
    quotas: Quotas,
) -> Iterator[Tier]:
    """Open the tiers, fastest first; whoever asks for them closes those that came."""
    terms = Terms(config.lease_seconds, config.high_watermark, config.low_watermark)
    host = None
    if config.host_bytes:
        host = HostTier(config.host_bytes, terms=terms, allocate=allocate, observer=observer, quotas=quotas)
        yield host
    if config.disk_bytes:
        yield DiskTier(
            config.path, config.disk_bytes, fsync=config.fsync, terms=terms, observer=observer, quotas=quotas
        )
    if config.mooncake is not None:
        mooncake = mooncake_tier(config.mooncake, observer, terms)
        yield mooncake
        if host is not None:
            _share_memory(host, mooncake)


def _share_memory(host: HostTier, mooncake: MooncakeTier) -> None:
    try:
        mooncake.register(host.memory)
    except TierUnavailable as error:
        _log.warning("%s; objects are copied on their way to and from %s", error, mooncake.name)


def store_secret(config: StoreConfig) -> bytes:
    """Return the secret of the store that ``config`` describes.

    It is the settings', or the one in the disk tier's directory, made on first use; a store in memory alone has a new
    one each time.

    Raises:
        TierUnavailable: the directory, or the secret in it, cannot be used.
    """
    if config.secret is not None:
        return config.secret
    return load_secret(config.path) if config.disk_bytes else os.urandom(SECRET_NBYTES)


def _policy(config: StoreConfig) -> Policy:
    return Policy(
        write=config.write_policy,
        write_hits=config.write_hits,
        write_retries=config.write_retries,
        prefetch=config.prefetch_policy,
        prefetch_base=config.prefetch_base_ms / 1e3,
        prefetch_per_ki_token=config.prefetch_ms_per_ki_token / 1e3,
        staging_bytes=config.staging_bytes,
        inflight_bytes=config.inflight_bytes,
    )

"""From settings to a store."""

from __future__ import annotations

import os

from blend.config import StoreConfig
from blend.store.base import Tier
from blend.store.disk import DiskTier
from blend.store.host import HostTier
from blend.store.secret import SECRET_NBYTES, load_secret
from blend.store.tiered import TieredStore


def open_store(config: StoreConfig) -> tuple[TieredStore, bytes]:
    """Return the store that ``config`` describes, and the secret that keys its names.

    A store in memory alone needs no directory: unless it is given a secret, it draws one that lasts as long as it.

    Raises:
        TierUnavailable: the directory or the secret in it cannot be used.
    """
    tiers: list[Tier] = []
    if config.host_bytes:
        tiers.append(HostTier(config.host_bytes))
    if config.disk_bytes:
        tiers.append(DiskTier(config.path, config.disk_bytes, fsync=config.fsync))
    if config.secret is not None:
        secret = config.secret
    elif config.disk_bytes:
        secret = load_secret(config.path)
    else:
        secret = os.urandom(SECRET_NBYTES)
    return TieredStore(tiers), secret

"""Mooncake Store, an engine that pools the memory of several machines: the one module that imports it.

See https://github.com/kvcache-ai/Mooncake for the engine, and "Mooncake: A KVCache-centric Disaggregated Architecture
for LLM Serving" (Qin et al., 2024) for its design.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from blend.config import MooncakeConfig
from blend.errors import InvalidInput, TierUnavailable
from blend.store import health
from blend.store.key import ObjectKey
from blend.store.mooncake_tier import MooncakeStatus, MooncakeTier
from blend.store.residency import ResidencyObserver

__all__ = ["MooncakeConfig", "MooncakeStatus", "MooncakeTier", "library", "listing", "mooncake_tier"]

_log = logging.getLogger(__name__)


def mooncake_tier(config: MooncakeConfig, observer: ResidencyObserver | None = None) -> MooncakeTier:
    """Return the tier that ``config`` describes; it may be down at first, and comes up by itself.

    Raises:
        TierUnavailable: Mooncake is not installed here, or there is no memory for staging.
    """
    return MooncakeTier(config, library(), observer=observer)


def listing(config: MooncakeConfig) -> list[ObjectKey]:
    """Return the keys of all objects under the prefix of ``config``, without joining the store.

    Raises:
        TierUnavailable: the master's admin page cannot be read.
    """
    found, begin = [], f"{config.prefix}:"
    for name in health.list_keys(config.health_address, config.deadline_seconds * 5):
        try:
            if name.startswith(begin):
                found.append(ObjectKey.parse(name[len(begin) :]))
        except InvalidInput:
            _log.debug("%s: not an object of this store", name)
    return found


def library() -> Callable[[], Any]:
    """Return the maker of the library's clients.

    Raises:
        TierUnavailable: it is not installed.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise TierUnavailable(
            f"Mooncake cannot be loaded: {error}; install blendkv[mooncake] and the system package libibverbs1"
        ) from error
    return MooncakeDistributedStore  # type: ignore[no-any-return]

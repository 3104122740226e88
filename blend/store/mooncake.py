"""Mooncake Store, an engine that pools the memory of several machines: the one module that imports it.

See https://github.com/kvcache-ai/Mooncake for the engine, and "Mooncake: A KVCache-centric Disaggregated Architecture
for LLM Serving" (Qin et al., 2024) for its design.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blend.config import MooncakeConfig
from blend.errors import TierUnavailable
from blend.store.mooncake_tier import MooncakeStatus, MooncakeTier, listing
from blend.store.residency import ResidencyObserver
from blend.store.terms import DEFAULT_TERMS, Terms

__all__ = ["MooncakeConfig", "MooncakeStatus", "MooncakeTier", "library", "listing", "mooncake_tier"]


def mooncake_tier(
    config: MooncakeConfig, observer: ResidencyObserver | None = None, terms: Terms = DEFAULT_TERMS
) -> MooncakeTier:
    """Return the tier that ``config`` describes; it may be down at first, and comes up by itself.

    Raises:
        TierUnavailable: Mooncake is not installed here, or there is no memory for staging.
    """
    return MooncakeTier(config, library(), observer=observer, terms=terms)


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

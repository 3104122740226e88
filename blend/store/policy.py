"""How a tiered store writes and prefetches, by the names that users of hierarchical caches know."""

from __future__ import annotations

from dataclasses import dataclass

from blend.config import PREFETCH_POLICIES, WRITE_POLICIES, StoreConfig
from blend.errors import InvalidConfig


@dataclass(frozen=True)
class Policy:
    """The policies of a tiered store. Defaults and meanings are those of :class:`blend.StoreConfig`; times in seconds.

    Args:
        write: ``write_through``, ``write_through_selective`` or ``write_back``.
        write_hits: hits after which a selective write goes through.
        write_retries: further attempts at a failed write to a lower tier.
        retry_seconds: pause before the first of them; each further pause is twice as long.
        prefetch: ``best_effort``, ``wait_complete`` or ``timeout``.
        prefetch_base, prefetch_per_ki_token: the timeout is the first plus the second for every 1,024 tokens.
        stall_seconds: longest wait for a load under ``wait_complete``; what is not there by then counts as failed.
        staging_bytes: budget of objects that wait to be written to lower tiers.
        inflight_bytes: budget of objects that are being loaded from lower tiers.

    Raises:
        InvalidConfig: there is no such policy, or a number is out of range.
    """

    write: str = StoreConfig.write_policy
    write_hits: int = StoreConfig.write_hits
    write_retries: int = StoreConfig.write_retries
    retry_seconds: float = 0.05
    prefetch: str = StoreConfig.prefetch_policy
    prefetch_base: float = StoreConfig.prefetch_base_ms / 1e3
    prefetch_per_ki_token: float = StoreConfig.prefetch_ms_per_ki_token / 1e3
    stall_seconds: float = 30.0
    staging_bytes: int = StoreConfig.staging_bytes
    inflight_bytes: int = StoreConfig.inflight_bytes

    def __post_init__(self) -> None:
        for name, names in (("write", WRITE_POLICIES), ("prefetch", PREFETCH_POLICIES)):
            if getattr(self, name) not in names:
                raise InvalidConfig(f"policy.{name}", getattr(self, name), ", ".join(names))
        for name, low in (("write_hits", 1), ("write_retries", 0), ("staging_bytes", 0), ("inflight_bytes", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise InvalidConfig(f"policy.{name}", value, f"an integer of at least {low}")
        for name in ("retry_seconds", "prefetch_base", "prefetch_per_ki_token", "stall_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise InvalidConfig(f"policy.{name}", value, "a number of at least 0 (seconds)")

    def prefetch_seconds(self, tokens: int) -> float | None:
        """Return how long a load of ``tokens`` may be waited for; ``None`` means until it is done."""
        if self.prefetch == "wait_complete":
            return None
        if self.prefetch == "best_effort":
            return 0.0
        return self.prefetch_base + self.prefetch_per_ki_token * tokens / 1024


DEFAULT_POLICY = Policy()
"""What a store does that is told nothing else."""

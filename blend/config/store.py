"""The tiered store."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from blend.config.checks import at_least, one_of, within
from blend.config.mooncake import MooncakeConfig
from blend.config.residency import ResidencyConfig
from blend.config.units import GiB, MiB, cache_dir
from blend.errors import InvalidConfig

MAX_TENANT = 128
"""Most characters of a tenant's name."""
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True)
class StoreConfig:
    """The tiered store.

    Args:
        host_bytes: budget of the host-memory tier; 0 leaves the tier out. With a GPU, the host tier's memory is pinned
            as a whole when the engine starts.
        disk_bytes: budget of the disk tier; 0 leaves the tier out.
        directory: where the disk tier lives; ``None`` means ``cache_dir() / "store"``.
        fsync: whether a stored object is flushed to the device before it counts as durable.
        secret: bytes that key every content key (shared by all engines of one store). ``None`` keeps a
            random secret in the store's directory, readable by the owner alone; machines that share a Mooncake
            store need to be given the same one.
        write_policy: when an object goes to the tiers below the fastest: ``write_through`` (at once),
            ``write_through_selective`` (once it was found ``write_hits`` times) or ``write_back`` (when it is evicted
            from the fastest, and at close).
        write_hits: see above.
        write_retries: how often a failed write to a lower tier is tried again.
        prefetch_policy: how long a request waits for slow tiers before it goes on without the chunks that are not all
            there: ``best_effort`` (not at all: what has come while it queued), ``wait_complete`` (until all is
            there, 30 s at most; it begins with the first layer, and waits for each further one where it needs it,
            2 s at most) or
            ``timeout`` (``prefetch_base_ms + prefetch_ms_per_ki_token`` × tokens / 1024).
        prefetch_base_ms, prefetch_ms_per_ki_token: see above, in milliseconds.
        staging_bytes: budget of objects that wait to be written to lower tiers.
        inflight_bytes: budget of objects that are being loaded from lower tiers.
        high_watermark: share of a tier's budget above which it evicts.
        low_watermark: share of its budget at which it stops.
        lease_seconds: how long a reader may hold an object without renewing; ``None`` means without end.
        tenant_quota_bytes: most bytes that a tenant (a namespace, to the engine's calls) may hold in the host tier, and
            again in the disk tier, there in all processes together; ``None`` means no limit but the tier's budget.
        tenant_quotas: pairs of a tenant's name and its own quota in bytes, instead of that one.
        mooncake: a Mooncake store below the other tiers, shared by several machines; ``None`` leaves it out.
        residency: tells other nodes what the tiers hold, and listens to what they tell; ``None`` does neither.
    """

    host_bytes: int = 1 * GiB
    disk_bytes: int = 16 * GiB
    directory: str | Path | None = None
    fsync: bool = True
    secret: bytes | None = field(default=None, repr=False)
    write_policy: str = "write_through"
    write_hits: int = 2
    write_retries: int = 2
    prefetch_policy: str = "wait_complete"
    prefetch_base_ms: float = 20.0
    prefetch_ms_per_ki_token: float = 20.0
    staging_bytes: int = 256 * MiB
    inflight_bytes: int = 1 * GiB
    high_watermark: float = 0.95
    low_watermark: float = 0.9
    lease_seconds: float | None = None
    tenant_quota_bytes: int | None = None
    tenant_quotas: tuple[tuple[str, int], ...] = ()
    mooncake: MooncakeConfig | None = None
    residency: ResidencyConfig | None = None

    def __post_init__(self) -> None:
        at_least("store.host_bytes", self.host_bytes, 0, "bytes")
        at_least("store.disk_bytes", self.disk_bytes, 0, "bytes")
        if not self.host_bytes and not self.disk_bytes and self.mooncake is None:
            raise InvalidConfig("store.host_bytes, store.disk_bytes", 0, "at least one tier with a budget")
        if self.secret is not None and (not isinstance(self.secret, bytes) or len(self.secret) < 16):
            raise InvalidConfig("store.secret", "…", "at least 16 bytes, or none")
        one_of("store.write_policy", self.write_policy, WRITE_POLICIES)
        one_of("store.prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        at_least("store.write_hits", self.write_hits, 1, "hits")
        at_least("store.write_retries", self.write_retries, 0, "retries")
        at_least("store.staging_bytes", self.staging_bytes, 0, "bytes")
        at_least("store.inflight_bytes", self.inflight_bytes, 1, "bytes")
        within("store.prefetch_base_ms", self.prefetch_base_ms, 0.0, math.inf)
        within("store.prefetch_ms_per_ki_token", self.prefetch_ms_per_ki_token, 0.0, math.inf)
        within("store.high_watermark", self.high_watermark, 0.01, 1.0)
        within("store.low_watermark", self.low_watermark, 0.01, self.high_watermark)
        if self.lease_seconds is not None:
            within("store.lease_seconds", self.lease_seconds, 0.001, math.inf)
        _check_quotas(self.tenant_quota_bytes, self.tenant_quotas)

    @property
    def path(self) -> Path:
        """The disk tier's directory."""
        return Path(self.directory).expanduser() if self.directory is not None else cache_dir() / "store"


def _check_quotas(default: int | None, quotas: tuple[tuple[str, int], ...]) -> None:
    if default is not None:
        at_least("store.tenant_quota_bytes", default, 1, "bytes")
    pairs = isinstance(quotas, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in quotas)
    if not pairs:
        raise InvalidConfig("store.tenant_quotas", quotas, "a tuple of pairs: a tenant's name, and bytes")
    seen: set[str] = set()
    for name, nbytes in quotas:
        if not _is_tenant(name) or name in seen:
            raise InvalidConfig("store.tenant_quotas", name, f"different names of 1 to {MAX_TENANT} characters")
        seen.add(name)
        at_least(f"store.tenant_quotas[{name!r}]", nbytes, 1, "bytes")


def _is_tenant(name: object) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_TENANT and name.encode(errors="ignore").decode() == name

"""What the command ``blend-store`` works on: a data directory, or the store of a Mooncake master."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blend.config import MooncakeConfig
from blend.errors import InvalidInput, NotFound, TierUnavailable
from blend.store import health
from blend.store.base import Tier
from blend.store.disk import DiskTier
from blend.store.key import ObjectKey, check_tag, tenant_tag
from blend.store.mooncake import listing, mooncake_tier
from blend.store.secret import load_secret
from blend.store.tenants import NO_QUOTAS, Quotas

SCHEME = "mooncake://"
_NO_BUDGET = 1 << 62
"""A budget that nothing is evicted for: looking at a store must not change it."""


@dataclass(frozen=True)
class Target:
    """A store by its name: ``path`` of a directory, or settings of a Mooncake client."""

    name: str
    path: Path | None = None
    mooncake: MooncakeConfig | None = None

    @classmethod
    def parse(cls, name: str, health_address: str | None = None, prefix: str = "blend") -> Target:
        """Return the store that ``name`` names: ``mooncake://host:port``, or a directory.

        Raises:
            InvalidInput: a malformed address.
            NotFound: the directory is not there, or holds no store.
        """
        if name.startswith(SCHEME):
            config = MooncakeConfig(
                name.removeprefix(SCHEME), health=health_address, prefix=prefix, connect_seconds=10.0, threads=2
            )
            return cls(name, mooncake=config)
        if "://" in name:
            raise InvalidInput("target", name, f"a directory, or {SCHEME}host:port")
        path = Path(name).expanduser()
        # A server's data directory keeps its store in a directory of that name.
        for place in (path, path / "store"):
            if (place / "layout").is_file():
                return cls(name, path=place)
        raise NotFound("store (a directory with a file named layout)", name)

    @contextmanager
    def tier(self, budget: int = _NO_BUDGET) -> Iterator[Tier]:
        """Open the store; ``budget`` is that of a directory, which is brought below it.

        Raises:
            TierUnavailable: it cannot be used, or its master does not answer.
        """
        if self.path is not None:
            with DiskTier(self.path, budget) as disk:
                yield disk
        else:
            assert self.mooncake is not None
            with mooncake_tier(self.mooncake) as tier:
                status = tier.status()
                if not status.up:
                    raise TierUnavailable(f"{self.name}: {status.reason}")
                yield tier

    def keys(self, tier: Tier) -> list[ObjectKey]:
        """Return the keys of all objects, in order of their names."""
        return sorted(tier.keys() if self.mooncake is None else listing(self.mooncake))

    def tag(self, namespace: str) -> str:
        """Return the tag that ``namespace`` is: one already, or the name of a tenant of a directory with a secret.

        Raises:
            InvalidInput: neither a tag, nor a name where names can be told.
            TierUnavailable: the secret cannot be read.
        """
        try:
            return check_tag("NAMESPACE", namespace)
        except InvalidInput:
            if self.path is None or not (self.path / "secret").is_file():
                raise InvalidInput(
                    "NAMESPACE", namespace, "12 or 18 hex digits: names are told by the secret, which is not kept here"
                ) from None
            return tenant_tag(load_secret(self.path), namespace)

    def quotas(self) -> Quotas:
        """Return the quotas that were last set for a directory; none for Mooncake, which has none."""
        try:
            return Quotas.decode((self.path / "quotas").read_text()) if self.path is not None else NO_QUOTAS
        except FileNotFoundError:
            return NO_QUOTAS

    def quarantined_bytes(self) -> int:
        """Return the bytes of corrupt objects that a directory has set aside; 0 for Mooncake, which keeps none."""
        if self.path is None:
            return 0
        files = (entry for entry in (self.path / "quarantine").iterdir() if entry.is_file())
        return sum(entry.stat().st_size for entry in files)

    def usage(self, tier: Tier) -> dict[str, int | str]:
        """Return how full the store is, by field."""
        if self.mooncake is not None:
            lent = health.segments(self.mooncake.health_address, self.mooncake.deadline_seconds)
            return {
                "used_bytes": lent.used_bytes,
                "capacity_bytes": lent.capacity_bytes,
                "segments": lent.segments,
            }
        stats = tier.stats()
        return {
            "used_bytes": stats.used_bytes,
            "quarantined": stats.quarantined,
            "quarantined_bytes": self.quarantined_bytes(),
        }

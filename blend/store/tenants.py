"""Tenants of a store: their names where this process knows them, their quotas, and what they hold."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from blend.store.key import tenant_tag


def _unnamed(tenant: str) -> str:
    return f"tenant {tenant}"


@dataclass(frozen=True)
class Quotas:
    """Most bytes that each tenant may hold in one tier, what is being written included.

    Args:
        default: for tenants that ``limits`` does not name; ``None`` means no limit but the tier's budget.
        limits: by tenant tag.
        describe: names a tenant in messages, by its tag.
    """

    default: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    describe: Callable[[str], str] = field(default=_unnamed, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", MappingProxyType(dict(self.limits)))

    def limit(self, tenant: str) -> int | None:
        """Return the quota of the tenant with that tag in bytes, or ``None``."""
        return self.limits.get(tenant, self.default)

    def encode(self) -> str:
        """Return a line for each quota: ``default`` or a tag, and the bytes."""
        lines = [] if self.default is None else [f"default {self.default}\n"]
        return "".join(lines + [f"{tag} {limit}\n" for tag, limit in sorted(self.limits.items())])

    @classmethod
    def decode(cls, text: str) -> Quotas:
        """Return the quotas that :meth:`encode` wrote; lines that say something else are passed over."""
        default, limits = None, {}
        for line in text.splitlines():
            tag, _, limit = line.partition(" ")
            if limit.isascii() and limit.isdigit() and tag == "default":
                default = int(limit)
            elif limit.isascii() and limit.isdigit():
                limits[tag] = int(limit)
        return cls(default, limits)


NO_QUOTAS = Quotas()
"""Every tenant may fill a tier."""


@dataclass(frozen=True)
class TenantUsage:
    """What one tenant holds in one tier.

    ``tenant`` is its tag. ``used_bytes`` includes what it is writing, what was removed under a lease and is still
    reachable, and what was set aside as corrupt; it never exceeds ``quota_bytes``, where there is one.
    """

    tenant: str
    used_bytes: int
    quota_bytes: int | None


def usage_of(shares: Mapping[str, int], quotas: Quotas) -> tuple[TenantUsage, ...]:
    """Return what ``shares`` says, bytes by tenant tag, with everyone's quota; most bytes first."""
    ordered = sorted(shares.items(), key=lambda share: (-share[1], share[0]))
    return tuple(TenantUsage(tenant, nbytes, quotas.limit(tenant)) for tenant, nbytes in ordered if nbytes)


class Tenants:
    """The names of the tenants that this process has met: a bounded memory. Thread-safe.

    Args:
        secret: the store's.
        limit: most names that are kept; the least recently met one is forgotten.
    """

    def __init__(self, secret: bytes, limit: int = 100_000) -> None:
        self._secret = secret
        self._limit = limit
        self._lock = threading.Lock()
        self._tags: OrderedDict[str, str] = OrderedDict()
        self._names: dict[str, str] = {}

    def learn(self, name: str) -> str:
        """Remember a tenant's name; return its tag.

        Raises:
            InvalidInput: not the name of a tenant.
        """
        with self._lock:
            tag = self._tags.get(name)
            if tag is None:
                tag = self._tags[name] = tenant_tag(self._secret, name)
                self._names[tag] = name
            self._tags.move_to_end(name)
            if len(self._tags) > self._limit:
                self._names.pop(self._tags.popitem(last=False)[1], None)
        return tag

    def name(self, tenant: str) -> str | None:
        """Return the name of the tenant with that tag, if it is known."""
        with self._lock:
            return self._names.get(tenant)

    def describe(self, tenant: str) -> str:
        """Return what to call a tenant in a message: by name where it is known."""
        name = self.name(tenant)
        return _unnamed(tenant) if name is None else f"tenant {name!r} ({tenant})"

    def quotas(self, default: int | None, limits: Iterable[tuple[str, int]]) -> Quotas:
        """Return quotas given by tenants' names, which are learnt."""
        return Quotas(default, {self.learn(name): limit for name, limit in limits}, self.describe)

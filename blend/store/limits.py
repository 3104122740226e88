"""How much a tier and each of its tenants may hold."""

from __future__ import annotations

from blend.errors import InvalidConfig, ResourceExhausted
from blend.store.key import ObjectKey, tenant_of
from blend.store.tenants import NO_QUOTAS, Quotas
from blend.store.terms import DEFAULT_TERMS, Terms


class Limits:
    """The budget, watermarks and quotas of one tier.

    Args:
        tier: its name, for messages.
        capacity: the budget in bytes.
        terms: watermarks.
        quotas: what each tenant may hold of the budget.

    Raises:
        InvalidConfig: the budget is no positive integer.
    """

    def __init__(self, tier: str, capacity: int, terms: Terms = DEFAULT_TERMS, quotas: Quotas = NO_QUOTAS) -> None:
        if type(capacity) is not int or capacity < 1:
            raise InvalidConfig(f"{tier}.capacity_bytes", capacity, "an integer of at least 1 (bytes)")
        self.tier = tier
        self.capacity = capacity
        self.quotas = quotas
        self._high, self._low = int(capacity * terms.high_watermark), int(capacity * terms.low_watermark)

    def require_fits(self, key: ObjectKey, nbytes: int) -> None:
        """Raise :class:`ResourceExhausted` if an object of ``nbytes`` is larger than the whole tier, or its quota."""
        if nbytes > self.capacity:
            raise ResourceExhausted(
                f"{self.tier}: an object of {nbytes} bytes is larger than the whole tier ({self.capacity} bytes)"
            )
        quota = self.quotas.limit(key.tenant)
        if quota is not None and nbytes > quota:
            raise ResourceExhausted(
                f"{self.tier}: an object of {nbytes} bytes is larger than the whole quota of "
                f"{self.quotas.describe(key.tenant)} ({quota} bytes)"
            )

    def no_room(self, nbytes: int) -> ResourceExhausted:
        """Return the error of a tier whose every byte is held."""
        return ResourceExhausted(
            f"{self.tier}: no room for {nbytes} bytes: leases, pins and writers hold too much of "
            f"{self.capacity} bytes; release some, or give the tier a larger budget"
        )

    def over_quota(self, namespace: str, nbytes: int) -> ResourceExhausted:
        """Return the error of a tenant that cannot make room by its own objects; ``namespace`` is a tag of its own."""
        tenant = tenant_of(namespace)
        return ResourceExhausted(
            f"{self.tier}: no room for {nbytes} bytes in namespace {namespace} within the quota of "
            f"{self.quotas.describe(tenant)}: leases, pins and writers hold too much of its "
            f"{self.quotas.limit(tenant)} bytes; "
            "release some, or raise the quota"
        )

    def excess(self, tenant: str, share: int, nbytes: int) -> int:
        """Return how many bytes of its own a tenant that holds ``share`` has to give before ``nbytes`` more."""
        quota = self.quotas.limit(tenant)
        return 0 if quota is None else max(0, share + nbytes - quota)

    def wanted(self, used: int, nbytes: int) -> tuple[int, int]:
        """Return how many bytes must go before ``nbytes`` more are spent, and how many should.

        Nothing should until the high watermark is passed; then all above the low one.
        """
        needed = max(0, used + nbytes - self.capacity)
        should = used + nbytes - self._low if used + nbytes > self._high else 0
        return needed, max(needed, should)

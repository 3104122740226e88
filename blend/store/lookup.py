"""What becomes of asking a store for an object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blend.errors import LeaseReleased, StoreError
from blend.store.base import Lease
from blend.store.promotion import Gate, Promotion


@dataclass(frozen=True)
class Lookup:
    """What became of asking for an object.

    ``lease`` and ``tier`` are ``None`` unless a tier had it. ``reason`` names every tier that failed while it was
    asked, and how; it is empty when none did, so that a miss with a reason is a fault. ``fault`` is the last error.
    """

    lease: Lease | None
    tier: str | None
    reason: str = ""
    fault: StoreError | None = None


@dataclass(frozen=True)
class Found(Lookup):
    """A look-up whose lease is a tier's own. ``gate`` is there when a slower one served it, for copies of it."""

    gate: Gate | None = None


def told(faults: Sequence[StoreError]) -> tuple[str, StoreError | None]:
    """Return ``reason`` and ``fault`` of a look-up on whose way these happened."""
    return "; ".join(str(fault) for fault in faults), faults[-1] if faults else None


class TieredLease(Lease):
    """A tier's lease that counts its faults, and promotes the object when it reads all of it."""

    def __init__(self, on_fault: Callable[[str, Exception], None], inner: Lease, promotion: Promotion | None) -> None:
        super().__init__(inner.header, inner.tier)
        self._on_fault = on_fault
        self._inner = inner
        self._promotion = promotion
        self._promoted: Lease | None = None

    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        whole = (first, count) == (0, self.header.layers)
        try:
            if whole and self._promotion is not None and self._promoted is None:
                self._promoted = self._promotion.read_through(self._inner)
            view = (self._promoted or self._inner).layers(first, count, into)
        except StoreError as error:
            self._count(error)
            raise
        if self._promotion is not None and into is None and not whole:
            self._promotion.offer(self.header, first, view)
        return view

    def renew(self) -> None:
        self._inner.renew()
        if self._promoted is not None:
            self._promoted.renew()

    @property
    def seconds_left(self) -> float:
        return (self._promoted or self._inner).seconds_left

    def release(self) -> None:
        self._inner.release()
        if self._promotion is not None:
            self._promotion.cancel()
        if self._promoted is not None:
            self._promoted.release()

    def _count(self, error: StoreError) -> None:
        if not isinstance(error, LeaseReleased):
            self._on_fault(self.tier, error)

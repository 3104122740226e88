"""What becomes of a write: its three events, its counts, and the copy that waits where no tier holds one."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from blend.store.base import Lease, given
from blend.store.layout import Header


@dataclass(frozen=True)
class Stored:
    """The three events of a write, each a future of its own.

    Attributes:
        copied: the payload has been copied, so that the caller's memory is free. Its result is True.
        readable: the object can be read from the fastest tier. True, or False where another writer's was there first.
        durable: True when a tier that outlives this process has it; False when the write policy leaves that to
            later, when there is no such tier, or when the object was removed meanwhile. A :class:`StoreError` or
            :class:`ResourceExhausted` when every attempt failed.
    """

    copied: Future[bool] = field(default_factory=Future)
    readable: Future[bool] = field(default_factory=Future)
    durable: Future[bool] = field(default_factory=Future)

    def settled(self) -> None:
        """Wait for the end of the write.

        Raises:
            StoreError, ResourceExhausted: no tier has the object.
        """
        fault = self.durable.exception()
        if fault is not None and self.readable.exception() is not None:
            raise fault


@dataclass(frozen=True)
class WriteStats:
    """What writing has done. ``copied_errors``, ``readable_errors`` and ``durable_errors`` count futures that failed;
    ``retries`` counts further attempts; ``dirty`` are the objects, and their bytes, that are in the fastest tier alone
    and will be written; ``waiting`` are the writes that are queued."""

    staging_bytes: int
    staging_capacity_bytes: int
    staging_peak_bytes: int
    waiting: int
    dirty: int
    dirty_bytes: int
    copied_errors: int
    readable_errors: int
    durable_errors: int
    retries: int


class StagedLease(Lease):
    """A copy of an object that no tier holds yet."""

    def __init__(self, header: Header, payload: memoryview) -> None:
        super().__init__(header, "staging")
        self._payload: memoryview | None = payload

    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        offset, nbytes = self.header.layer_range(first, count)
        if self._payload is None:
            raise self._released()
        return given(self._payload[offset - self.header.header_nbytes :][:nbytes], into)

    def release(self) -> None:
        self._payload = None

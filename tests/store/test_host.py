from __future__ import annotations

import gc

import numpy as np
import pytest

from blend.errors import ObjectCorrupt, ResourceExhausted, TierUnavailable
from blend.store import HostTier, encode
from tests.store.helpers import OBJECT_NBYTES, make


def test_leases_are_views_not_copies() -> None:
    tier = HostTier(1 << 20)
    tier.put(*make(1))
    with tier.get(make(1)[0].key) as one, tier.get(make(1)[0].key) as other:  # type: ignore[union-attr]
        addresses = {np.frombuffer(lease.payload(), np.uint8).ctypes.data for lease in (one, other)}
        assert len(addresses) == 1
        assert np.frombuffer(one.layer(0), np.uint8).ctypes.data in addresses


def test_bytes_are_verified_when_they_enter() -> None:
    tier = HostTier(1 << 20)
    header, payload = make(1)
    for at in range(0, len(payload), 37):
        wrong = bytearray(payload)
        wrong[at] ^= 0x10
        with pytest.raises(ObjectCorrupt, match="layer"):
            tier.put(header, wrong)
    writer = tier.start(header.key, header.object_nbytes)
    writer.write(0, bytes(header.header_nbytes))
    writer.write(header.header_nbytes, payload)
    with pytest.raises(ObjectCorrupt, match="magic"):
        writer.commit()
    assert tier.stats().used_bytes == 0


def test_a_view_alone_pins() -> None:
    """Whoever keeps a view, an array or an array's slice has the bytes, and the budget knows."""
    tier = HostTier(OBJECT_NBYTES)
    header, payload = make(1)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    kept = np.frombuffer(lease.layer(1), np.uint16)[::3]
    lease.release()
    del lease
    gc.collect()
    with pytest.raises(ResourceExhausted):
        tier.put(*make(2))
    tier.remove(header.key)
    with pytest.raises(ResourceExhausted):
        tier.put(*make(2))
    want = np.frombuffer(payload[header.layer_nbytes : 2 * header.layer_nbytes], np.uint16)[::3]
    assert (kept == want).all()
    del kept
    assert tier.put(*make(2))


def test_memory_that_the_system_does_not_have() -> None:
    def none(nbytes: int) -> bytearray:
        raise MemoryError

    for allocate in (none, lambda nbytes: bytearray(nbytes - 1), bytes):
        with pytest.raises(TierUnavailable, match="bytes"):
            HostTier(1 << 20, allocate=allocate)
    with pytest.raises(TierUnavailable):
        HostTier(1 << 62)


def test_integrity_finds_wrong_bytes() -> None:
    tier = HostTier(1 << 20)
    header, payload = make(1)
    writer = tier.start(header.key, header.object_nbytes)
    writer.write(0, encode(header))
    writer.write(header.header_nbytes, payload)
    buffer = writer._buffer  # type: ignore[attr-defined]
    writer.commit()
    tier.check_integrity()
    buffer[-1] ^= 1
    with pytest.raises(ObjectCorrupt):
        tier.check_integrity()

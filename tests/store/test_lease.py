"""Leases that end by themselves, pins and watermarks, on every tier that has terms."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blend.errors import InvalidConfig, InvalidInput, LeaseReleased, ResourceExhausted
from blend.store import DiskTier, HostTier, Lease, Terms, Tier, TieredStore
from tests.store.helpers import OBJECT_NBYTES, make, read


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Maker = Callable[..., Tier]


@pytest.fixture(params=["host", "disk"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Maker:
    def maker(objects: int, **terms: float) -> Tier:
        agreed = Terms(clock=clock, **terms)
        if request.param == "host":
            return HostTier(objects * OBJECT_NBYTES, terms=agreed)
        return DiskTier(tmp_path, objects * OBJECT_NBYTES, fsync=False, terms=agreed)

    return maker


def lease_on(tier: Tier, seed: int) -> Lease:
    lease = tier.get(make(seed)[0].key)
    assert lease is not None
    return lease


def test_a_lease_expires_in_the_middle_of_reading(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(4, lease_seconds=10)
    header, payload = make(1)
    tier.put(header, payload)
    lease = lease_on(tier, 1)
    view = lease.layer(0)
    assert lease.seconds_left == 10
    clock.now += 9.5
    assert lease.seconds_left == 0.5
    lease.layer(1)
    clock.now += 0.5
    for use in (lease.payload, lambda: lease.layer(2), lease.renew):
        with pytest.raises(LeaseReleased, match="expired after 10"):
            use()
    assert lease.seconds_left == 0
    lease.release()
    assert bytes(view) == payload[: header.layer_nbytes]
    assert read(tier, header.key) == payload


def test_a_renewed_lease_goes_on(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(4, lease_seconds=10)
    tier.put(*make(1))
    lease = lease_on(tier, 1)
    for _ in range(5):
        clock.now += 9
        lease.renew()
    assert bytes(lease.payload()) == make(1)[1]
    lease.release()
    with pytest.raises(LeaseReleased, match="released"):
        lease.renew()


def test_leases_without_a_time_do_not_expire(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(4)
    tier.put(*make(1))
    lease = lease_on(tier, 1)
    clock.now += 1e9
    lease.renew()
    assert lease.seconds_left == math.inf
    assert bytes(lease.payload()) == make(1)[1]


def test_a_forgotten_lease_holds_its_object_for_its_time_only(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(1, lease_seconds=10)
    tier.put(*make(1))
    lease = lease_on(tier, 1)
    with pytest.raises(ResourceExhausted):
        tier.put(*make(2))
    clock.now += 10
    assert tier.put(*make(2))
    with pytest.raises(LeaseReleased):
        lease.payload()
    tier.check_integrity()


def test_an_expired_lease_takes_no_memory_from_under_a_view(clock: Clock) -> None:
    tier = HostTier(OBJECT_NBYTES, terms=Terms(lease_seconds=10, clock=clock))
    header, payload = make(1)
    tier.put(header, payload)
    lease = lease_on(tier, 1)
    array = np.frombuffer(lease.payload(), np.uint8)
    clock.now += 100
    with pytest.raises(ResourceExhausted):
        tier.put(*make(2))
    assert array.tobytes() == payload
    del array
    assert tier.put(*make(2))


def test_removal_waits_for_leases_to_free_the_space(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(2, lease_seconds=10)
    tier.put(*make(1))
    lease = lease_on(tier, 1)
    assert tier.remove(make(1)[0].key)
    assert tier.stats().used_bytes == OBJECT_NBYTES
    assert bytes(lease.payload()) == make(1)[1]
    clock.now += 10
    gc.collect()
    assert tier.stats().used_bytes == 0
    tier.check_integrity()


def test_who_renewed_last_goes_last(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(3, lease_seconds=10)
    for seed in range(3):
        tier.put(*make(seed))
    leases = [lease_on(tier, seed) for seed in range(3)]
    clock.now += 5
    leases[0].renew()
    for lease in leases:
        lease.release()
    tier.put(*make(3))
    tier.put(*make(4))
    assert [tier.contains(make(seed)[0].key) for seed in range(5)] == [True, False, False, True, True]


def test_the_systems_clock_ends_and_extends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [
        HostTier(1 << 20, terms=Terms(lease_seconds=60)),
        DiskTier(tmp_path, 1 << 20, terms=Terms(lease_seconds=60)),
    ]
    for tier in tiers:
        header, payload = make(1)
        tier.put(header, payload)
        tier.pin(header.key, 60)
        lease = lease_on(tier, 1)
        for jump in (-86400, 86400 * 400):
            monkeypatch.setattr(time, "time", lambda jump=jump: jump)
            monkeypatch.setattr(time, "time_ns", lambda jump=jump: jump * 10**9)
            assert 0 < lease.seconds_left <= 60
            assert bytes(lease.payload()) == payload
            assert tier.variants(header.key.content) == ("plain",)
        assert tier.unpin(header.key)


def test_a_hard_pin_stays_until_it_is_taken_back(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(2)
    tier.put(*make(0))
    assert tier.pin(make(0)[0].key)
    assert not tier.pin(make(9)[0].key)
    for seed in range(1, 6):
        assert tier.put(*make(seed))
        clock.now += 1e6
        assert tier.contains(make(0)[0].key)
    with pytest.raises(ResourceExhausted):
        tier.start(make(9)[0].key, 2 * OBJECT_NBYTES)
    assert tier.unpin(make(0)[0].key)
    assert not tier.unpin(make(0)[0].key)
    tier.start(make(9)[0].key, 2 * OBJECT_NBYTES).revoke()
    assert not tier.contains(make(0)[0].key)


def test_a_pinned_object_can_be_removed_and_put_unpinned(make_tier: Maker) -> None:
    tier = make_tier(1)
    tier.put(*make(0))
    tier.pin(make(0)[0].key)
    assert tier.remove(make(0)[0].key)
    tier.put(*make(0))
    assert tier.put(*make(1))


def test_a_soft_pin_gives_way_when_nothing_else_does_or_its_time_is_over(make_tier: Maker, clock: Clock) -> None:
    tier = make_tier(3)
    for seed in range(3):
        tier.put(*make(seed))
    tier.pin(make(0)[0].key, 100)
    tier.pin(make(1)[0].key, 10)
    tier.put(*make(3))
    assert [tier.contains(make(seed)[0].key) for seed in range(4)] == [True, True, False, True]
    clock.now += 10
    tier.put(*make(4))
    assert [tier.contains(make(seed)[0].key) for seed in range(5)] == [True, False, False, True, True]
    tier.start(make(9)[0].key, 3 * OBJECT_NBYTES).revoke()
    assert not tier.contains(make(0)[0].key)
    tier.check_integrity()
    for seconds in (0, -1, math.nan, math.inf, True, "1"):
        tier.put(*make(0))
        with pytest.raises(InvalidInput, match="seconds"):
            tier.pin(make(0)[0].key, seconds)


def test_eviction_begins_above_the_high_watermark_and_ends_at_the_low_one(make_tier: Maker) -> None:
    tier = make_tier(10, high_watermark=0.8, low_watermark=0.5)
    counts = []
    for seed in range(14):
        tier.put(*make(seed))
        counts.append(tier.stats().objects)
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    assert tier.contains(make(13)[0].key)
    tier.check_integrity()


def test_between_the_watermarks_nobody_is_refused(make_tier: Maker) -> None:
    tier = make_tier(10, high_watermark=0.5, low_watermark=0.3)
    for seed in range(5):
        tier.put(*make(seed))
    leases = [lease_on(tier, seed) for seed in range(5)]
    for seed in range(5, 10):
        assert tier.put(*make(seed))
        leases.append(lease_on(tier, seed))
    assert tier.stats().used_bytes == 10 * OBJECT_NBYTES
    with pytest.raises(ResourceExhausted):
        tier.put(*make(10))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_seconds", 0),
        ("lease_seconds", math.inf),
        ("high_watermark", 0),
        ("high_watermark", 1.1),
        ("high_watermark", True),
        ("low_watermark", 1.01),
        ("low_watermark", -1),
    ],
)
def test_terms_say_what_is_wrong(field: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=field):
        Terms(**{field: value})


def test_a_tier_of_tiers_renews_and_expires_as_the_tier_that_serves(tmp_path: Path, clock: Clock) -> None:
    terms = Terms(lease_seconds=10, clock=clock)
    host = HostTier(1 << 20, terms=terms)
    store = TieredStore([host, DiskTier(tmp_path, 1 << 20, fsync=False, terms=terms)])
    store.put(*make(1))
    host.remove(make(1)[0].key)
    lease = lease_on(store, 1)
    assert lease.seconds_left == 10
    clock.now += 9
    lease.renew()
    assert lease.seconds_left == 10
    clock.now += 9
    assert bytes(lease.payload()) == make(1)[1]
    lease.renew()
    clock.now += 9
    assert bytes(lease.payload()) == make(1)[1]
    clock.now += 1
    with pytest.raises(LeaseReleased, match="expired"):
        lease.payload()
    assert store.stats().failures == 0
    assert store.pin(make(1)[0].key, 5)
    assert store.unpin(make(1)[0].key)
    assert not store.pin(make(2)[0].key)

"""A tier that fails is counted, and shown as down; the others are asked all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blend.errors import TierUnavailable
from blend.stats import tenant_stats
from blend.store import HostTier, ObjectKey, TenantUsage, TieredStore, TierStats
from tests.store.helpers import OBJECT_NBYTES, make, read

ROOM = 1 << 20
REASON = "EIO (Input/output error)"


class Failing(HostTier):
    """A tier of which every question fails while it is broken."""

    broken = False

    def _check(self) -> None:
        if self.broken:
            raise TierUnavailable(f"{self.name}: {REASON}")

    def variants(self, content: str) -> tuple[str, ...]:
        self._check()
        return super().variants(content)

    def pin(self, key: ObjectKey, seconds: float | None = None) -> bool:
        self._check()
        return super().pin(key, seconds)

    def unpin(self, key: ObjectKey) -> bool:
        self._check()
        return super().unpin(key)

    def keys(self) -> Iterator[ObjectKey]:
        self._check()
        return super().keys()

    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        self._check()
        return super().sizes()

    def tenants(self) -> tuple[TenantUsage, ...]:
        self._check()
        return super().tenants()

    def lingering(self, tag: str) -> int:
        self._check()
        return super().lingering(tag)

    def stats(self) -> TierStats:
        self._check()
        return super().stats()


@pytest.fixture(params=[0, 1], ids=["the fastest", "a slower one"])
def store(request: pytest.FixtureRequest) -> Iterator[TieredStore]:
    """Two tiers with the same object, one of which fails."""
    bad, good = Failing(ROOM, name="bad"), HostTier(ROOM, name="good")
    with TieredStore([bad, good] if request.param == 0 else [good, bad]) as made:
        made.put(*make(1))
        bad.broken = True
        yield made


def test_the_others_answer(store: TieredStore) -> None:
    header, payload = make(1)
    assert store.pin(header.key)
    assert store.unpin(header.key)
    assert not store.unpin(header.key)
    assert list(store.keys()) == [header.key]
    assert list(store.sizes()) == [(header.key, OBJECT_NBYTES)]
    assert store.variants(header.key.content) == ("plain",)
    assert [usage.used_bytes for usage in store.tenants()] == [OBJECT_NBYTES]
    assert store.lingering(header.key.tenant) == 0
    assert read(store, header.key) == payload


def test_it_is_down_and_says_why(store: TieredStore) -> None:
    states = {state.name: state for state in store.tier_stats()}
    assert [state.name for state in store.tier_stats()] == [tier.name for tier in store.tiers]
    assert (states["good"].objects, states["good"].used_bytes, states["good"].down) == (1, OBJECT_NBYTES, "")
    assert (states["bad"].objects, states["bad"].capacity_bytes) == (0, 0)
    assert REASON in states["bad"].down
    assert [usage.tier for usage in tenant_stats(store)] == ["good"]


def test_the_whole_is_down_only_with_all_its_tiers(store: TieredStore) -> None:
    whole = store.stats()
    assert (whole.objects, whole.used_bytes, whole.capacity_bytes, whole.down) == (1, OBJECT_NBYTES, ROOM, "")
    with TieredStore([next(tier for tier in store.tiers if tier.name == "bad")]) as lost:
        assert REASON in lost.stats().down
        with TieredStore([HostTier(ROOM), lost], name="over it") as over:
            assert [bool(state.down) for state in over.tier_stats()] == [False, True]


def test_the_faults_are_counted(store: TieredStore) -> None:
    before = store.stats().failures
    store.pin(make(1)[0].key)
    assert store.stats().failures == before + 2, "the pin, and listing the keys; asking for figures is none"


def test_it_is_up_again_when_it_answers(store: TieredStore) -> None:
    for tier in store.tiers:
        if isinstance(tier, Failing):
            tier.broken = False
    assert [state.down for state in store.tier_stats()] == ["", ""]
    assert store.stats().used_bytes == 2 * OBJECT_NBYTES

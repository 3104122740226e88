"""Resolving a variant asks no more tiers than it needs to: in some, asking costs a round trip, or a lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend.errors import TierUnavailable
from blend.store import DiskTier, HostTier, ObjectKey, TieredStore
from tests.store.helpers import make

ROOM = 1 << 20
PLAIN, PAYLOAD = make(1)
BETTER, OTHER = make(1, neighbours=[make(2)[0].key.content])
CONTENT = PLAIN.key.content


class Remote(HostTier):
    """A tier that counts how often it is asked, and that recalls some variants without being asked."""

    def __init__(self) -> None:
        super().__init__(ROOM, name="remote")
        self.asked = 0
        self.seen: tuple[str, ...] = ()
        self.broken = False

    def contains(self, key: ObjectKey) -> bool:
        self.asked += 1
        if self.broken:
            raise TierUnavailable("remote: no route")
        return super().contains(key)

    def recall(self, content: str) -> tuple[str, ...]:
        return self.seen


@pytest.mark.parametrize("variant", ["plain", "best"])
def test_a_plain_variant_in_a_faster_tier_costs_no_round_trip(variant: str) -> None:
    remote = Remote()
    with TieredStore([HostTier(ROOM), remote]) as store:
        store.tiers[0].put(PLAIN, PAYLOAD)
        assert store.resolve(CONTENT, variant) == PLAIN.key  # type: ignore[arg-type]
        assert remote.asked == 0
        remote.broken = True
        assert store.resolve(CONTENT, variant) == PLAIN.key  # type: ignore[arg-type]


def test_a_conditioned_variant_is_preferred_wherever_it_is_known_to_be(tmp_path: Path) -> None:
    remote = Remote()
    remote.seen = (BETTER.key.variant,)
    with TieredStore([HostTier(ROOM), DiskTier(tmp_path, ROOM, fsync=False), remote]) as store:
        store.tiers[0].put(PLAIN, PAYLOAD)
        assert store.resolve(CONTENT, "best") == BETTER.key
        assert store.resolve(CONTENT, "conditioned") == BETTER.key
        assert store.resolve(CONTENT, "plain") == PLAIN.key
        assert remote.asked == 0


def test_a_remote_tier_is_asked_where_no_faster_one_has_anything() -> None:
    remote = Remote()
    with TieredStore([HostTier(ROOM), remote]) as store:
        remote.put(PLAIN, PAYLOAD)
        remote.asked = 0
        assert store.resolve(CONTENT, "conditioned") is None
        assert remote.asked == 0, "asking finds no conditioned variant"
        assert store.resolve(CONTENT, "best") == PLAIN.key
        assert store.resolve(CONTENT, "plain") == PLAIN.key
        assert remote.asked == 2
        remote.broken = True
        for variant in ("plain", "best"):
            with pytest.raises(TierUnavailable, match="no route"):
                store.resolve(CONTENT, variant)  # type: ignore[arg-type]


def test_the_plain_variant_is_found_beside_a_conditioned_one_that_is_recalled() -> None:
    remote = Remote()
    remote.seen = (BETTER.key.variant,)
    with TieredStore([HostTier(ROOM), remote]) as store:
        remote.put(PLAIN, PAYLOAD)
        assert store.resolve(CONTENT, "plain") == PLAIN.key
        assert store.resolve(CONTENT, "best") == BETTER.key


def test_a_store_below_another_one_is_asked_no_more() -> None:
    remote = Remote()
    with TieredStore([HostTier(ROOM), TieredStore([HostTier(ROOM), remote], name="below")]) as store:
        store.tiers[0].put(PLAIN, PAYLOAD)
        assert store.resolve(CONTENT, "best") == PLAIN.key
        remote.seen = (BETTER.key.variant,)
        assert store.resolve(CONTENT, "best") == BETTER.key
        assert store.recall(CONTENT) == tuple(sorted((PLAIN.key.variant, BETTER.key.variant)))
        assert remote.asked == 0


def test_a_slower_tier_is_asked_where_it_may_have_the_better_variant(tmp_path: Path) -> None:
    slow = DiskTier(tmp_path, ROOM, fsync=False)
    with TieredStore([HostTier(ROOM), slow]) as store:
        store.put(PLAIN, PAYLOAD)
        slow.put(BETTER, OTHER)
        assert store.resolve(CONTENT, "best") == BETTER.key
        assert store.resolve(CONTENT, "conditioned") == BETTER.key

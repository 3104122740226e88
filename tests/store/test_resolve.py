"""Resolving a variant asks no more tiers than it needs to: in some, asking costs a lease."""

from __future__ import annotations

from pathlib import Path

from blend.store import DiskTier, HostTier, TieredStore
from tests.store.helpers import make


class Asked(DiskTier):
    """A disk tier that counts how often it is asked for variants."""

    asked = 0

    def variants(self, content: str) -> tuple[str, ...]:
        type(self).asked += 1
        return super().variants(content)


def test_a_plain_variant_in_the_fastest_tier_is_asked_for_there_alone(tmp_path: Path) -> None:
    slow = Asked(tmp_path, 1 << 20, fsync=False)
    store = TieredStore([HostTier(1 << 20), slow])
    header, payload = make(1)
    store.put(header, payload)
    Asked.asked = 0
    assert store.resolve(header.key.content, "plain") == header.key
    assert Asked.asked == 0


def test_a_slower_tier_is_asked_where_it_may_have_the_better_variant(tmp_path: Path) -> None:
    slow = DiskTier(tmp_path, 1 << 20, fsync=False)
    with TieredStore([HostTier(1 << 20), slow]) as store:
        plain, payload = make(1)
        store.put(plain, payload)
        better, other = make(1, neighbours=[make(2)[0].key.content])
        slow.put(better, other)
        assert store.resolve(plain.key.content, "best") == better.key
        assert store.resolve(plain.key.content, "conditioned") == better.key

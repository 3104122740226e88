"""The contract of a tier, held by the real Mooncake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from blend.errors import StoreError
from blend.store import Tier
from blend.store.mooncake import MooncakeTier, library
from tests.store import test_contract as contract
from tests.store.conftest import MakeTier
from tests.store.helpers import make
from tests.store.mooncake_server import Master, cluster, config_for

__all__ = ["cluster"]
_prefixes = count()
# Parametrized for the tiers of one machine alone, or reaching into their insides.
_OWN = {
    "test_headers_are_told_without_a_use",
    "test_leases_pin_and_the_least_recently_used_goes_first",
    "test_integrity_finds_what_does_not_add_up",
}
for _name, _test in vars(contract).items():
    if _name.startswith("test_") and _name not in _OWN:
        globals()[_name] = _test


@pytest.fixture
def make_tier(cluster: Master) -> Iterator[MakeTier]:
    """Return a maker of clients, each with a prefix, and so objects, of its own."""
    made: list[Tier] = []

    def maker(capacity: int) -> Tier:
        config = config_for(cluster, prefix=f"contract{next(_prefixes)}")
        made.append(MooncakeTier(replace(config, capacity_bytes=capacity), library()))
        return made[-1]

    yield maker
    for tier in made:
        tier.close()


@pytest.fixture
def tier(make_tier: MakeTier) -> Tier:
    return make_tier(1 << 20)


def test_leases_pin_and_the_least_recently_used_goes_first(make_tier: MakeTier) -> None:
    contract.test_leases_pin_and_the_least_recently_used_goes_first(make_tier)


def test_integrity_finds_what_does_not_add_up(tier: MooncakeTier) -> None:
    tier.put(*make(1))
    tier.check_integrity()
    tier._ledger._used += 1
    with pytest.raises(StoreError, match="ledger"):
        tier.check_integrity()

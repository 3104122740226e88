"""What a store tells of a Mooncake tier, and when it asks it: against a real master."""

from __future__ import annotations

import pytest

from blend.store import HostTier, TieredStore
from blend.store.mooncake import MooncakeConfig, mooncake_tier
from blend.store.mooncake_client import MooncakeClient
from tests.store.helpers import make
from tests.store.mooncake_server import Master, cluster, config_for, free_port, require_mooncake, wait_for

__all__ = ["cluster"]


def test_it_is_asked_only_for_what_no_faster_tier_has(cluster: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    exists = MooncakeClient.exists

    def counted(client: MooncakeClient, name: str) -> bool:
        asked.append(name)
        return exists(client, name)

    plain, payload = make(1)
    better = make(1, neighbours=["8" * 40])[0].key
    remote = mooncake_tier(config_for(cluster, prefix="asked", staging_bytes=16 << 20))
    with TieredStore([HostTier(1 << 20), remote]) as store:
        wait_for("the tier joins", lambda: remote.status().up)
        store.put(plain, payload)
        monkeypatch.setattr(MooncakeClient, "exists", counted)
        for variant in ("plain", "best"):
            assert store.resolve(plain.key.content, variant) == plain.key  # type: ignore[arg-type]
        assert store.resolve(plain.key.content, "conditioned") is None
        remote.learn(better)
        assert store.resolve(plain.key.content, "best") == better
        assert asked == []
        assert store.resolve(make(2)[0].key.content, "best") is None
        assert len(asked) == 1


def test_it_is_down_without_a_master_and_says_why() -> None:
    require_mooncake()
    config = MooncakeConfig(f"127.0.0.1:{free_port()}", health=f"127.0.0.1:{free_port()}", connect_seconds=0)
    with TieredStore([HostTier(1 << 20), mooncake_tier(config)]) as store:
        host, remote = store.tier_stats()
        assert (host.down, bool(remote.down)) == ("", True)
        assert remote.capacity_bytes == config.capacity_bytes
        assert store.stats().down == ""

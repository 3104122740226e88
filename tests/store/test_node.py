"""A node's part in residency, as a store has it: what it tells, what it learns, and that it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic, sleep

import pytest

from blend.config import MooncakeConfig, ResidencyConfig, ResidencySource, StoreConfig
from blend.errors import InvalidConfig, TierUnavailable
from blend.store import TieredStore, open_store
from blend.store.events import ResidencySubscriber
from blend.store.residency import ResidencyIndex
from tests.store.helpers import OBJECT_NBYTES, make, read
from tests.store.mooncake_server import Master, cluster, config_for, free_port, wait_for

__all__ = ["cluster"]


def opened(directory: Path, residency: ResidencyConfig, mooncake: MooncakeConfig | None = None) -> TieredStore:
    return open_store(
        StoreConfig(
            host_bytes=4 * OBJECT_NBYTES,
            disk_bytes=16 * OBJECT_NBYTES if mooncake is None else 0,
            directory=directory,
            fsync=False,
            secret=b"the secret of all nodes",
            mooncake=mooncake,
            residency=residency,
        )
    )[0]


def source(store: TieredStore) -> ResidencySource:
    assert store.residency is not None
    publisher = store.residency.publisher
    return ResidencySource(publisher.address, publisher.replay_address)


def follower(name: str, *stores: TieredStore) -> ResidencyConfig:
    return ResidencyConfig(name, sources=tuple(source(store) for store in stores))


def of_events() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("blend-events")]


def test_a_store_tells_what_its_tiers_hold(tmp_path: Path) -> None:
    index, keys = ResidencyIndex(), [make(seed)[0].key for seed in range(8)]

    def held() -> tuple[int, int]:
        (found,) = index.best(keys) or [None]
        return (found.objects, found.nbytes) if found is not None else (0, 0)

    with opened(tmp_path, ResidencyConfig("a")) as store, ResidencySubscriber(index, [source(store)]):
        for seed in range(8):
            store.put(*make(seed))
        wait_for("all objects", lambda: held() == (8, 8 * OBJECT_NBYTES))  # four on disk alone
        store.remove(keys[0])
        wait_for("a removal", lambda: held() == (7, 7 * OBJECT_NBYTES))
        assert index.nodes() == ("a",)
    with opened(tmp_path, ResidencyConfig("b")) as store, ResidencySubscriber(index, [source(store)]):
        wait_for("what was there before", lambda: [found.objects for found in index.best(keys)] == [7, 7])


def test_stores_know_of_each_other(tmp_path: Path) -> None:
    with opened(tmp_path / "a", ResidencyConfig("a")) as one:
        one.put(*make(1))
        with opened(tmp_path / "b", follower("b", one)) as two:
            assert two.residency is not None
            index = two.residency.index
            wait_for("the other node", lambda: [found.node for found in index.best([make(1)[0].key])] == ["a"])


def test_variants_of_others_are_found_in_the_shared_store(cluster: Master, tmp_path: Path) -> None:
    mooncake = config_for(cluster, prefix="residency")
    plain, payload = make(1)
    conditioned, other = make(1, neighbours=["ab" * 20])
    content = plain.key.content
    with (
        opened(tmp_path, ResidencyConfig("a"), mooncake) as one,
        opened(tmp_path, ResidencyConfig("deaf"), mooncake) as deaf,
        opened(tmp_path, follower("b", one), mooncake) as two,
    ):
        one.put(plain, payload)
        one.put(conditioned, other)
        wait_for("the variant", lambda: two.resolve(content, "best") == conditioned.key)
        assert two.variants(content) == (conditioned.key.variant, "plain")
        assert two.resolve(content, "conditioned") == conditioned.key
        assert read(two, conditioned.key) == other
        assert two.lookup(conditioned.key).tier == "host"
        assert deaf.resolve(content, "best") == plain.key, "it can only guess the plain one"
        two.remove(conditioned.key)
        one.remove(conditioned.key)
        assert one.resolve(content, "best") == two.resolve(content, "best") == plain.key
        with opened(tmp_path, follower("late", one), mooncake) as late:
            wait_for("the plain variant", lambda: late.variants(content) == ("plain",))


def test_a_variant_that_another_node_removed_is_not_looked_for(cluster: Master, tmp_path: Path) -> None:
    mooncake = config_for(cluster, prefix="unlearned")
    conditioned, payload = make(2, neighbours=["ab" * 20])
    with (
        opened(tmp_path, ResidencyConfig("a"), mooncake) as one,
        opened(tmp_path, follower("b", one), mooncake) as two,
    ):
        one.put(conditioned, payload)
        wait_for("the variant", lambda: two.resolve(conditioned.key.content, "conditioned") == conditioned.key)
        one.remove(conditioned.key)
        wait_for("its removal", lambda: two.resolve(conditioned.key.content, "conditioned") is None)


def test_closing_a_store_ends_its_threads(tmp_path: Path) -> None:
    assert of_events() == []
    with opened(tmp_path / "a", ResidencyConfig("a")) as one:
        two = opened(tmp_path / "b", follower("b", one))
        assert sorted(of_events()) == ["blend-events"] * 2 + ["blend-events-index"] + ["blend-events-replay"] * 2
        two.put(*make(1))
        two.close()
        two.close()
        assert len(of_events()) == 2
    assert of_events() == []


def test_what_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    with opened(tmp_path / "a", ResidencyConfig("a")) as one:
        taken = source(one).address
        before = of_events()
        for residency in (ResidencyConfig("b", publish=taken), ResidencyConfig("b", replay=taken)):
            with pytest.raises(TierUnavailable, match="bound"):
                opened(tmp_path / "b", residency)
        (tmp_path / "file").write_text("no directory")
        with pytest.raises(TierUnavailable, match="directory"):
            opened(tmp_path / "file", follower("b", one))
        assert of_events() == before


def test_a_node_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    nobody = tuple(ResidencySource(*(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))) for _ in range(3))
    begin = monotonic()
    with opened(tmp_path, ResidencyConfig("a", sources=nobody)) as store:
        store.put(*make(1))
        sleep(0.2)
        assert read(store, make(1)[0].key) == make(1)[1]
    assert monotonic() - begin < 30


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"node": ""}, "residency.node"),
        ({"node": "n" * 257}, "1 to 256"),
        ({"node": None}, "residency.node"),
        ({"publish": "127.0.0.1:5557"}, "tcp://HOST:PORT"),
        ({"publish": "tcp://127.0.0.1"}, "residency.publish"),
        ({"publish": "tcp://127.0.0.1:0"}, "residency.publish"),
        ({"replay": "udp://127.0.0.1:5"}, "residency.replay"),
        ({"replay": "ipc://"}, "ipc://PATH"),
        ({"sources": ["tcp://127.0.0.1:5557"]}, "residency.sources"),
        ({"max_entries": 0}, "residency.max_entries"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidConfig, match=match):
        ResidencyConfig(**{"node": "a", **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:*", "tcp://*:5557", "tcp://:5", "tcp://a b:5", "nowhere", None, 5]
)
def test_others_addresses_are_checked(address: object) -> None:
    with pytest.raises(InvalidConfig, match="residency.sources.address"):
        ResidencySource(address)  # type: ignore[arg-type]
    if address is not None:
        with pytest.raises(InvalidConfig, match="residency.sources.replay_address"):
            ResidencySource("tcp://127.0.0.1:5557", address)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["a..b", "[::1", "é", "a/b", "-", "10.0.0.300", ";", "x" * 300])
def test_an_odd_host_is_refused_or_is_a_node_that_is_not_there(host: str) -> None:
    try:
        ResidencySubscriber(ResidencyIndex(), [ResidencySource(f"tcp://{host}:5557")]).close()
    except TierUnavailable as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or (host in refusal and "listened to" in refusal)
    assert of_events() == []


def test_an_index_of_a_node_is_bounded(tmp_path: Path) -> None:
    with opened(tmp_path / "a", ResidencyConfig("a")) as one:
        config = ResidencyConfig("b", sources=(source(one),), max_entries=2)
        with opened(tmp_path / "b", config) as two:
            for seed in range(4):
                one.put(*make(seed))
            assert two.residency is not None
            index = two.residency.index
            wait_for("the events", lambda: index.ignored >= 2)
            assert len(index) == 2

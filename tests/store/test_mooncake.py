"""The Mooncake tier against a real master: what goes wrong costs time, never an answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import numpy as np
import pytest

from blend.errors import (
    InvalidConfig,
    InvalidInput,
    LeaseReleased,
    ObjectCorrupt,
    ResourceExhausted,
    StoreError,
    TierUnavailable,
)
from blend.store import DiskTier, HostTier, ObjectKey, Terms, TieredStore, encode
from blend.store.mooncake import MooncakeConfig, MooncakeTier, library, listing, mooncake_tier
from tests.store.helpers import make, read
from tests.store.mooncake_server import (
    PATIENCE,
    Master,
    Owner,
    Proxy,
    cluster,
    config_for,
    free_port,
    master,
    require_mooncake,
    wait_for,
)

__all__ = ["cluster", "master"]
_prefixes = count()
Join = Callable[..., MooncakeTier]


def beyond(counter: Iterator[int], number: int) -> bool:
    return next(counter) > number


@pytest.fixture
def join() -> Iterator[Join]:
    """Return a maker of clients of a master, closed in the end."""
    require_mooncake()
    with ExitStack() as stack:

        def make_client(cluster: Master, **settings: object) -> MooncakeTier:
            config = config_for(cluster, **{"prefix": f"t{next(_prefixes)}", **settings})
            return stack.enter_context(MooncakeTier(config, library()))

        yield make_client


@pytest.fixture
def lend(master: Master) -> Iterator[Callable[[int], Owner]]:
    """Return a starter of owners, stopped in the end."""
    owners: list[Owner] = []

    def start(nbytes: int) -> Owner:
        owners.append(Owner(master, nbytes))
        return owners[-1]

    yield start
    for owner in owners:
        owner.stop()


class Raw:
    """A client of the library alone, for what the tier itself never does."""

    def __init__(self, master: Master) -> None:
        self.client: Any = library()()
        assert self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master.rpc) == 0

    def put(self, name: str, data: bytes) -> None:
        room = np.frombuffer(bytearray(data), np.uint8)
        assert self.client.register_buffer(room.ctypes.data, len(room)) == 0
        assert self.client.batch_put_from([name], [room.ctypes.data], [len(room)]) == [0]
        assert self.client.unregister_buffer(room.ctypes.data) == 0


@pytest.fixture
def raw(cluster: Master) -> Iterator[Raw]:
    raw = Raw(cluster)
    yield raw
    raw.client.close()


def up(tier: MooncakeTier) -> bool:
    return tier.status().up


def served(tier: MooncakeTier, key: ObjectKey) -> bytes | None:
    """Read an object as a request would: a fault is a miss."""
    try:
        return read(tier, key)
    except StoreError:
        return None


def test_two_processes_worth_of_clients_share_objects(cluster: Master, join: Join) -> None:
    one = join(cluster, prefix="shared")
    other = join(cluster, prefix="shared")
    header, payload = make(1)
    conditioned, more = make(1, neighbours=["ab" * 20])
    assert one.put(header, payload)
    assert other.contains(header.key)
    assert other.variants(header.key.content) == ("plain",)
    assert read(other, header.key) == payload
    assert not other.put(header.sealed(bytes(len(payload))), bytes(len(payload)))
    assert read(one, header.key) == payload
    one.put(conditioned, more)
    other.learn(conditioned.key)
    assert other.variants(header.key.content) == (conditioned.key.variant, "plain")
    assert read(other, conditioned.key) == more
    assert sorted(listing(one.config)) == sorted([header.key, conditioned.key])
    assert list(other.keys()) == []
    other.remove(header.key)
    assert read(one, header.key) is None
    assert one.stats().objects == 1


def test_a_view_of_one_client_outlives_removal_by_another(cluster: Master, join: Join) -> None:
    one, other = (join(cluster, prefix="removal") for _ in range(2))
    header, payload = make(2)
    one.put(header, payload)
    lease = other.get(header.key)
    assert lease is not None
    view = lease.layer(0)
    one.remove(header.key)
    replacement = bytes(len(payload))
    one.put(header.sealed(replacement), replacement)
    assert bytes(view) == payload[: header.layer_nbytes]
    try:  # what the lease was on is gone: its bytes, or an error, but never the other object's
        assert bytes(lease.layer(1)) == payload[header.layer_nbytes : 2 * header.layer_nbytes]
    except StoreError:
        assert read(other, header.key) in (None, replacement)
    assert read(one, header.key) == replacement


def test_large_objects_go_in_pieces(cluster: Master, join: Join) -> None:
    tier = join(cluster, staging_bytes=24 << 20)
    header, payload = make(3, tokens=512, head_dim=512, layers=7)
    assert header.payload_nbytes > 12 << 20
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    with lease:
        view = lease.payload()
        assert view == payload
        del view
        into = bytearray(len(payload))
        lease.payload(memoryview(into))
        assert into == payload
        assert bytes(lease.layer(6)) == payload[6 * header.layer_nbytes :]


def test_objects_of_others_may_be_larger_than_the_staging_memory(cluster: Master, join: Join) -> None:
    big, small = join(cluster, prefix="large"), join(cluster, prefix="large", staging_bytes=64 << 10)
    header, payload = make(30, tokens=700, head_dim=4, layers=4)
    big.put(header, payload)
    lease = small.get(header.key)
    assert lease is not None
    assert header.layer_nbytes < 64 << 10 < header.payload_nbytes
    assert lease.payload() == payload
    assert bytes(lease.layer(3)) == payload[-header.layer_nbytes :]
    with pytest.raises(ResourceExhausted, match="staging"):
        small.put(*make(31, tokens=700, head_dim=4, layers=4))
    wide, _ = make(32, tokens=4000, head_dim=8)
    big.put(wide, make(32, tokens=4000, head_dim=8)[1])
    held = small.get(wide.key)
    assert held is not None
    with pytest.raises(TierUnavailable, match="staging_bytes"):
        held.layer(0)


def test_registered_memory_is_put_without_a_copy(cluster: Master, join: Join) -> None:
    tier = join(cluster)
    header, payload = make(4)
    memory = np.frombuffer(bytearray(payload), np.uint8)
    tier.register(memory)
    used = tier.status().staging_used_bytes
    assert tier.put(header, memory)
    assert not tier.put(header, memory)
    assert tier.status().staging_used_bytes == used
    tier.unregister(memory)
    assert read(tier, header.key) == payload
    with pytest.raises(InvalidInput, match="registered"):
        tier.unregister(memory)
    with pytest.raises(InvalidInput, match="registered"):
        tier._client.put("x", [memoryview(memory)])
    tier.check_integrity()


def test_staging_is_bounded_and_comes_back(cluster: Master, join: Join) -> None:
    tier = join(cluster, staging_bytes=64 << 10, deadline_seconds=0.5)
    header, payload = make(5, tokens=100, head_dim=8)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    views = []
    with lease, pytest.raises(TierUnavailable, match="staging"):
        while True:
            views.append(lease.payload())
    assert tier.status().staging_used_bytes <= tier.status().staging_capacity_bytes
    assert all(view == payload for view in views)
    views.clear()
    del lease
    assert read(tier, header.key) == payload
    wait_for("staging to be free", lambda: tier.status().staging_used_bytes == 0)
    big, data = make(6, tokens=1000, head_dim=64)
    with pytest.raises(ResourceExhausted, match="staging"):
        tier.put(big, data)
    assert tier.stats().used_bytes == header.object_nbytes


@pytest.mark.parametrize("damage", ["header", "token ids", "first layer", "last byte", "short", "empty", "another key"])
def test_wrong_bytes_from_the_store_are_found_and_go(cluster: Master, join: Join, raw: Raw, damage: str) -> None:
    tier = join(cluster)
    header, payload = make(7)
    whole = bytearray(encode(header) + payload)
    at = {"header": 20, "token ids": 154, "first layer": header.header_nbytes + 3, "last byte": -1}.get(damage)
    if at is not None:
        whole[at] ^= 1
    if damage in ("short", "empty"):
        whole = whole[: len(whole) - 5 if damage == "short" else 100]
    if damage == "another key":
        other, data = make(8)
        whole = bytearray(encode(other) + data)
    name = f"{tier.config.prefix}:{header.key}"
    raw.put(name, bytes(whole))
    with pytest.raises((ObjectCorrupt, TierUnavailable)):
        read(tier, header.key)
    assert tier.stats().failures == 1
    if damage not in ("short", "empty"):
        assert tier.put(header, payload)
        assert read(tier, header.key) == payload


def test_a_full_store_refuses_and_keeps_what_it_has(master: Master, lend: Callable[[int], Owner], join: Join) -> None:
    lend(16 << 20)
    tier = join(master)
    objects = [make(seed, tokens=256, head_dim=128) for seed in range(48)]  # 19 MiB
    leases, refused = [], 0
    for header, payload in objects:
        try:
            tier.put(header, payload)
            leases.append(tier.get(header.key))
        except ResourceExhausted:
            refused += 1
    assert refused > 0
    assert tier.status().up
    for lease in leases:
        assert lease is not None
        payload = next(data for header, data in objects if header.key == lease.header.key)
        assert lease.payload() == payload
    leases.clear()
    tier.check_integrity()


def test_no_master_at_start(join: Join, tmp_path: Any) -> None:
    nobody = Master()
    begin = monotonic()
    tier = join(nobody, connect_seconds=0.3)
    with TieredStore([HostTier(1 << 20), tier]) as store:
        header, payload = make(1)
        assert store.put(header, payload)
        assert read(store, header.key) == payload
        assert store.lookup(make(2)[0].key).lease is None
        status = tier.status()
        assert not status.up
        assert "health" in status.reason
        with pytest.raises(TierUnavailable, match="down"):
            tier.get(header.key)
        with pytest.raises(TierUnavailable, match="down"):
            tier.put(header, payload)
        assert not tier.contains(header.key)
        assert tier.stats().used_bytes == 0
        assert monotonic() - begin < 60  # far from the 90 s that the library waits for a master
        nobody.start()
        try:
            wait_for("joining", lambda: up(tier))
        finally:
            nobody.kill()


def test_the_master_is_killed_and_started_again_under_load(
    master: Master, lend: Callable[[int], Owner], join: Join, tmp_path: Any
) -> None:
    lend(64 << 20)
    tier = join(master)
    store = TieredStore([tier, DiskTier(tmp_path / "disk", 64 << 20, fsync=False)])
    objects = [make(seed) for seed in range(40)]
    stop, wrong, done = threading.Event(), [], count()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            header, payload = rng.choice(objects)
            with suppress(StoreError, ResourceExhausted):  # what counts is that nothing wrong comes back
                store.put(header, payload)
            found = store.lookup(header.key)
            if found.lease is not None:
                with found.lease, suppress(StoreError):
                    if bytes(found.lease.payload()) != payload:
                        wrong.append(header.key)
                next(done)

    threads = [threading.Thread(target=work, args=(seed,), name="load") for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            stop.wait(0.5)
            master.kill()
            wait_for("the outage to be noticed", lambda: not up(tier))
            enough = next(done) + 20
            wait_for("the disk to serve on", partial(beyond, done, enough))
            master.start()
            wait_for("the recovery", lambda: up(tier))
            wait_for("the store to take objects again", lambda: served(tier, objects[0][0].key) is not None)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    for header, payload in objects:
        assert read(store, header.key) in (payload, None)
    store.check_integrity()
    store.close()


def test_an_owner_is_killed(master: Master, lend: Callable[[int], Owner], join: Join) -> None:
    owner = lend(64 << 20)
    tier = join(master, deadline_seconds=3.0)
    objects = [make(seed) for seed in range(6)]
    for header, payload in objects:
        tier.put(header, payload)
    lease = tier.get(objects[0][0].key)
    assert lease is not None
    owner.kill()
    with pytest.raises(TierUnavailable):
        lease.layer(0)
    begin = monotonic()
    for header, _ in objects:
        assert served(tier, header.key) is None
    first = monotonic() - begin
    begin = monotonic()
    for header, _ in objects[:1]:
        for _ in range(50):
            assert served(tier, header.key) is None
    assert monotonic() - begin < first + 5  # known to be out of reach: nobody waits for them again
    lend(64 << 20)
    assert tier.status().staging_used_bytes <= tier.status().staging_capacity_bytes

    def stored_again() -> bool:
        header, payload = make(100)
        try:
            tier.put(header, payload)
        except StoreError:
            return False
        return served(tier, header.key) == payload

    wait_for("the new owner to take objects", stored_again)


def test_a_stalled_link_costs_the_deadline_and_no_more(
    master: Master, lend: Callable[[int], Owner], join: Join
) -> None:
    lend(64 << 20)
    proxy = Proxy(master.rpc)
    try:
        tier = join(master, master=proxy.address, deadline_seconds=0.5, negative_seconds=1.0)
        header, payload = make(1)
        tier.put(header, payload)
        assert read(tier, header.key) == payload
        proxy.stall()
        begin = monotonic()
        for seed in range(2, 12):
            assert served(tier, make(seed)[0].key) is None
        assert not up(tier)
        assert monotonic() - begin < 20
        assert tier.status().late_calls > 0
        proxy.resume()
        wait_for("the link to recover", lambda: served(tier, header.key) == payload)
        tier.check_integrity()
    finally:
        proxy.close()


def test_a_stalled_owner_costs_the_deadline_and_keeps_the_memory_it_may_write(
    master: Master, lend: Callable[[int], Owner], join: Join
) -> None:
    owner = lend(64 << 20)
    tier = join(master, deadline_seconds=0.5, negative_seconds=1.0, staging_bytes=1 << 20)
    header, payload = make(1, tokens=64, head_dim=64)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    owner.stall()
    try:
        with pytest.raises(TierUnavailable, match="no answer"):
            lease.layer(1)
        assert tier.status().staging_used_bytes > 0  # a transfer is under way into it, whoever waits
        assert tier.status().late_calls == 1
    finally:
        owner.resume()
    wait_for("the transfer to end", lambda: tier.status().staging_used_bytes == 0)
    wait_for("the owner to be used again", lambda: served(tier, header.key) == payload)
    assert bytes(lease.layer(1)) == payload[header.layer_nbytes : 2 * header.layer_nbytes]
    tier.check_integrity()


def test_closing_lets_the_last_lease_read_on(cluster: Master, join: Join) -> None:
    tier = join(cluster)
    header, payload = make(9)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    tier.close()
    assert bytes(lease.payload()) == payload
    assert any(thread.name == "blend-mooncake-monitor" for thread in threading.enumerate())
    monitor = tier._client.link._monitor
    del lease
    monitor.join(PATIENCE)
    assert not monitor.is_alive()


def test_a_process_may_lend_memory_itself(master: Master, join: Join) -> None:
    tier = join(master, segment_bytes=32 << 20)
    header, payload = make(10)
    wait_for("the segment", lambda: served_after_put(tier, 10))
    assert read(tier, header.key) == payload


def served_after_put(tier: MooncakeTier, seed: int) -> bool:
    header, payload = make(seed)
    try:
        tier.put(header, payload)
    except (StoreError, ResourceExhausted):
        return False
    return served(tier, header.key) == payload


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master", "nowhere"),
        ("master", "host:0"),
        ("health", "host:99999"),
        ("protocol", "udp"),
        ("hostname", ""),
        ("prefix", "a b"),
        ("segment_bytes", -1),
        ("capacity_bytes", 0),
        ("staging_bytes", 1),
        ("threads", 0),
        ("deadline_seconds", 0),
        ("negative_seconds", float("inf")),
        ("connect_seconds", True),
    ],
)
def test_settings_are_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"mooncake.{field}"):
        MooncakeConfig(**{"master": "127.0.0.1:50051", field: value})  # type: ignore[arg-type]


def test_the_factory_makes_a_tier_that_may_be_down() -> None:
    require_mooncake()
    config = MooncakeConfig(f"127.0.0.1:{free_port()}", health=f"127.0.0.1:{free_port()}", connect_seconds=0)
    assert config.health_address == config.health
    assert MooncakeConfig("host:1").health_address == "host:9003"
    with mooncake_tier(config) as tier:
        assert not tier.status().up


def test_leases_here_have_the_time_that_the_settings_give(cluster: Master) -> None:
    now = 100.0
    terms = Terms(lease_seconds=10.0, clock=lambda: now)
    require_mooncake()
    header, payload = make(1)
    with mooncake_tier(config_for(cluster, prefix=f"t{next(_prefixes)}"), terms=terms) as tier:
        wait_for("the tier joins", lambda: tier.status().up)
        tier.put(header, payload)
        lease, renewed = tier.get(header.key), tier.get(header.key)
        assert lease is not None and renewed is not None
        assert lease.seconds_left == 10.0
        now += 9.0
        renewed.renew()
        assert bytes(lease.layer(0)) == payload[: header.layer_nbytes]
        now += 2.0
        with pytest.raises(LeaseReleased, match="expired after 10.0 s"):
            lease.payload()
        assert bytes(renewed.payload()) == payload
        renewed.release()
        assert read(tier, header.key) == payload


def test_a_chunk_that_was_found_is_known_without_asking_again(cluster: Master, join: Join) -> None:
    header, payload = make(3)
    prefix = f"t{next(_prefixes)}"
    first, second = join(cluster, prefix=prefix), join(cluster, prefix=prefix)
    for tier in (first, second):
        wait_for("both join", lambda tier=tier: tier.status().up)
    first.put(header, payload)
    assert second.variants(header.key.content) == ("plain",)
    asked = []
    second._client.exists = lambda name: asked.append(name)  # type: ignore[method-assign,assignment,func-returns-value]
    assert second.variants(header.key.content) == ("plain",)
    assert asked == []

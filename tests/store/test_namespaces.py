"""Listing namespaces, and dropping one from every tier while everything else goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from blend.errors import InvalidInput, ResourceExhausted, TierUnavailable
from blend.store import DiskTier, HostTier, Namespace, ObjectKey, TieredStore, Usage, content_key
from blend.store.policy import Policy
from tests.store.helpers import BROKEN, OBJECT_NBYTES, FaultyIO, make, read

SECRET = b"a secret of this test suite"
ONE, NEWER, OTHER = (
    Namespace(name, model * 16, SECRET) for name, model in (("one", "0f"), ("one", "1e"), ("other", "0f"))
)
TENANT = ONE.tag[:12]


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def store(tmp_path: Path, io: FaultyIO) -> Iterator[TieredStore]:
    tiers = [HostTier(1 << 20), DiskTier(tmp_path, 1 << 20, fsync=False, io=io)]
    with TieredStore(tiers) as made:
        yield made


def keys(store: TieredStore) -> set[str]:
    return {key.namespace for key, _ in store.sizes()}


def test_every_namespace_is_listed_with_what_it_has_in_each_tier(store: TieredStore) -> None:
    for number, namespace in enumerate((ONE, NEWER, OTHER)):
        for seed in range(number + 1):
            store.put(*make(seed, namespace=namespace))
    host, disk = store.tiers
    host.remove(make(0, namespace=ONE)[0].key)
    disk.remove(make(0, namespace=NEWER)[0].key)
    found = {usage.tag: usage.tiers for usage in store.namespaces()}
    assert found == {
        ONE.tag: {"disk": Usage(1, OBJECT_NBYTES)},
        NEWER.tag: {"host": Usage(2, 2 * OBJECT_NBYTES), "disk": Usage(1, OBJECT_NBYTES)},
        OTHER.tag: {"host": Usage(3, 3 * OBJECT_NBYTES), "disk": Usage(3, 3 * OBJECT_NBYTES)},
    }
    assert list(found) == sorted(found)
    assert [(usage.tenant, usage.used_bytes) for usage in store.tenants()] == [
        (OTHER.tag[:12], 6 * OBJECT_NBYTES),
        (TENANT, 4 * OBJECT_NBYTES),
    ]


@pytest.mark.parametrize("tag", [ONE.tag, TENANT])
def test_a_dropped_namespace_is_in_no_tier(store: TieredStore, tag: str) -> None:
    for namespace in (ONE, NEWER, OTHER):
        for seed in range(3):
            store.put(*make(seed, namespace=namespace))
    store.tiers[0].remove(make(1, namespace=ONE)[0].key)
    seen: list[int] = []

    def track(found: Sequence[ObjectKey]) -> Sequence[ObjectKey]:
        seen.append(len(found))
        return found

    dropped = store.drop(tag, track)
    count = 3 if tag == ONE.tag else 6
    assert seen == [count, 0]
    assert (dropped.objects, dropped.lingering_bytes, dropped.left) == (count, 0, {})
    assert dropped.tiers == {
        "host": Usage(count - 1, (count - 1) * OBJECT_NBYTES),
        "disk": Usage(count, count * OBJECT_NBYTES),
    }
    assert keys(store) == {OTHER.tag, NEWER.tag} if tag == ONE.tag else {OTHER.tag}
    for seed in range(3):
        assert store.lookup(make(seed, namespace=ONE)[0].key).lease is None
        assert read(store, make(seed, namespace=OTHER)[0].key) == make(seed, namespace=OTHER)[1]
    assert store.put(*make(0, namespace=ONE))  # the namespace may be used again
    store.check_integrity()


def test_other_words_are_no_namespaces(store: TieredStore) -> None:
    for tag in ("", "one", ONE.tag[:13], content_key(ONE, [1])):
        with pytest.raises(InvalidInput, match="namespace"):
            store.drop(tag)


def test_what_is_held_goes_when_it_is_released(store: TieredStore) -> None:
    for seed in range(2):
        store.put(*make(seed, namespace=ONE))
    host, disk = store.tiers
    host.remove(make(1, namespace=ONE)[0].key)
    leases = [host.get(make(0, namespace=ONE)[0].key), disk.get(make(1, namespace=ONE)[0].key)]
    dropped = store.drop(TENANT)
    assert (dropped.objects, dropped.lingering_bytes) == (2, 2 * OBJECT_NBYTES)
    assert list(store.keys()) == []
    assert [usage.used_bytes for usage in store.tenants()] == [2 * OBJECT_NBYTES]
    for seed, lease in enumerate(leases):
        assert lease is not None
        assert bytes(lease.payload()) == make(seed, namespace=ONE)[1]
        lease.release()
    del lease, leases
    assert store.tenants() == ()
    assert store.lingering(TENANT) == 0
    store.check_integrity()


def test_a_promotion_that_is_under_way_comes_to_nothing(store: TieredStore) -> None:
    header, payload = make(0, namespace=ONE)
    store.tiers[1].put(header, payload)
    lease = store.get(header.key)
    assert lease is not None
    for layer in range(header.layers - 1):
        lease.layer(layer)
    store.drop(ONE.tag)
    assert bytes(lease.payload()) == payload
    lease.layer(header.layers - 1)
    lease.release()
    assert list(store.keys()) == []


def test_a_write_to_a_lower_tier_that_waits_comes_to_nothing(tmp_path: Path) -> None:
    go = threading.Event()

    class SlowIO(FaultyIO):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if len(data) > 100:  # an object
                go.wait(30)
            return super().pwrite(fd, data, offset)

    # The first tier has no room: the object is in none while it waits to be written.
    host, disk = HostTier(1), DiskTier(tmp_path, 1 << 20, fsync=False, io=SlowIO())
    with TieredStore([host, disk]) as store:
        writes = [store.put_async(*make(seed, namespace=ONE)) for seed in range(3)]
        assert store.drop(TENANT).objects == 0
        go.set()
        assert [write.durable.result(30) for write in writes] == [False, False, False]
        assert list(store.keys()) == []
        assert store.put(*make(0, namespace=ONE))
        store.check_integrity()


def test_a_namespace_that_is_in_the_host_tier_alone_goes_too(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1 << 20, fsync=False)
    with TieredStore([HostTier(1 << 20), disk], policy=Policy(write="write_back")) as store:
        for seed in range(3):
            store.put(*make(seed, namespace=ONE))
            store.put(*make(seed, namespace=OTHER))
        assert store.drop(TENANT).tiers == {"host": Usage(3, 3 * OBJECT_NBYTES), "disk": Usage()}
        assert store.write_stats().dirty == 3
        assert store.flush() == 3
        assert {key.namespace for key, _ in disk.sizes()} == {OTHER.tag}


def test_a_tier_that_fails_is_named_and_the_others_go_on(store: TieredStore, io: FaultyIO) -> None:
    for seed in range(3):
        store.put(*make(seed, namespace=ONE))
    io.faults = {"unlink": BROKEN}
    dropped = store.drop(ONE.tag)
    assert dropped.tiers == {"host": Usage(3, 3 * OBJECT_NBYTES), "disk": Usage()}
    assert set(dropped.left) == {f"disk: {make(seed, namespace=ONE)[0].key}" for seed in range(3)}
    assert all("EIO" in reason for reason in dropped.left.values())
    io.faults = {}
    assert store.drop(ONE.tag).left == {}
    assert list(store.keys()) == []


def test_what_could_be_removed_at_the_second_attempt_is_not_left(store: TieredStore, io: FaultyIO) -> None:
    for seed in range(2):
        store.put(*make(seed, namespace=ONE))
    io.faults = {"unlink": BROKEN}

    def repaired(found: object) -> object:
        yield from found  # type: ignore[misc]
        io.faults = {}

    dropped = store.drop(ONE.tag, repaired)  # type: ignore[arg-type]
    assert (dropped.objects, dropped.left) == (2, {})
    assert dropped.tiers["disk"] == Usage(2, 2 * OBJECT_NBYTES)


def test_another_process_s_objects_are_dropped_too(tmp_path: Path) -> None:
    one, other = (TieredStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20, fsync=False)]) for _ in range(2))
    with one, other:
        for seed in range(3):
            other.put(*make(seed, namespace=ONE))
        assert one.drop(TENANT).objects == 3
        assert list(other.tiers[1].sizes()) == []
        assert list(one.keys()) == []


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_dropping_among_puts_reads_and_leases(tmp_path: Path, write: str) -> None:
    """Nothing but the namespace is lost, no lease reads a wrong byte, and at the end it can be dropped to nothing."""
    host = HostTier(8 * OBJECT_NBYTES)
    disk = DiskTier(tmp_path, 1 << 20, fsync=False)
    wrong: list[object] = []
    stop = threading.Event()
    with TieredStore([host, disk], policy=Policy(write=write)) as store:
        kept = [make(seed, namespace=OTHER) for seed in range(4)]
        for header, payload in kept:
            store.put(header, payload)

        def churn(number: int) -> None:
            step = 0
            while not stop.is_set():
                step += 1
                header, payload = make((number + step) % 6, namespace=(ONE, NEWER)[step % 2])
                try:
                    if number % 2:
                        store.put(header, payload)
                    else:
                        store.put_async(header, payload)
                except ResourceExhausted:
                    continue
                lease = store.get(header.key)
                if lease is not None:
                    with lease:
                        if bytes(lease.payload()) != payload:
                            wrong.append(header.key)

        def keep() -> None:
            while not stop.is_set():
                for header, payload in kept:
                    if read(store, header.key) != payload:
                        wrong.append(header.key)

        threads = [threading.Thread(target=churn, args=(number,), name=f"churn {number}") for number in range(8)]
        threads.append(threading.Thread(target=keep, name="reader"))
        for thread in threads:
            thread.start()
        dropped = [store.drop((TENANT, ONE.tag, NEWER.tag)[number % 3]) for number in range(30)]
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sum(one.objects for one in dropped) > 0
        assert all(not one.left for one in dropped)
        store.wait_idle(30)
        store.drop(TENANT)
        assert keys(store) == {OTHER.tag}
        assert store.lingering(TENANT) == 0
        for header, payload in kept:
            assert read(store, header.key) == payload
        store.check_integrity()


def test_nobody_finds_another_tenant_s_objects(store: TieredStore) -> None:
    ids = make(0)[0].token_ids
    contents = [content_key(namespace, ids) for namespace in (ONE, NEWER, OTHER)]
    store.put(*make(0, namespace=ONE))
    assert [store.resolve(content, "best") is not None for content in contents] == [True, False, False]
    assert [store.variants(content) for content in contents] == [("plain",), (), ()]


def test_a_tier_that_cannot_be_listed_is_named(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in (ONE, OTHER):
        store.put(*make(0, namespace=namespace))

    def down() -> None:
        raise TierUnavailable("host: down")

    monkeypatch.setattr(store.tiers[0], "sizes", down)
    dropped = store.drop(ONE.tag)
    assert (dropped.objects, dropped.left) == (1, {"host": "host: down"})
    assert dropped.tiers == {"host": Usage(1), "disk": Usage(1, OBJECT_NBYTES)}  # its bytes there are not known
    assert [(usage.tag, set(usage.tiers)) for usage in store.namespaces()] == [(OTHER.tag, {"disk"})]
    assert store.stats().failures == 1

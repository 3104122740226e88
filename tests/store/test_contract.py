"""What holds for every tier: host, disk, and a tier of tiers."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from blend.errors import (
    Closed,
    InvalidConfig,
    InvalidInput,
    LeaseReleased,
    ObjectCorrupt,
    ResourceExhausted,
    StoreError,
)
from blend.store import DiskTier, HostTier, Tier, encode
from tests.store.conftest import MakeTier
from tests.store.helpers import OBJECT_NBYTES, make, read

MISSING = make(999)[0].key


def test_what_was_put_comes_back(tier: Tier) -> None:
    header, payload = make(1)
    assert tier.put(header, payload)
    assert tier.contains(header.key)
    lease = tier.get(header.key)
    assert lease is not None
    with lease:
        assert lease.header == header
        assert bytes(lease.payload()) == payload
        size = header.layer_nbytes
        for layer in (2, 0, 1):
            view = lease.layer(layer)
            assert view.readonly
            assert bytes(view) == payload[layer * size : (layer + 1) * size]
        with pytest.raises(InvalidInput, match="layer"):
            lease.layer(3)
    tier.check_integrity()


@pytest.mark.parametrize("tokens", [1, 7, 1500])
def test_sizes_that_fit_no_page(tier: Tier, tokens: int) -> None:
    header, payload = make(tokens, tokens=tokens, head_dim=3)
    tier.put(header, np.frombuffer(payload, np.float16).reshape(3, 2, 2, tokens, 3))
    assert read(tier, header.key) == payload


def test_a_miss_is_none(tier: Tier) -> None:
    assert tier.get(MISSING) is None
    assert not tier.contains(MISSING)
    assert tier.variants(MISSING.content) == ()
    assert not tier.remove(MISSING)
    assert tier.stats().misses == 1


def test_an_object_never_changes(tier: Tier) -> None:
    header, payload = make(1)
    other = bytes(len(payload))
    assert tier.put(header, payload)
    assert not tier.put(header.sealed(other), other)
    assert read(tier, header.key) == payload
    assert tier.stats().objects == 1
    tier.check_integrity()


def test_the_first_writer_to_commit_stays(tier: Tier) -> None:
    header, payload = make(1)
    other = bytes(len(payload))
    first, second = (tier.start(header.key, header.object_nbytes) for _ in range(2))
    for writer, sealed, data in ((first, header, payload), (second, header.sealed(other), other)):
        writer.write(0, encode(sealed))
        writer.write(sealed.header_nbytes, data)
    assert second.commit()
    assert not first.commit()
    assert read(tier, header.key) == other
    tier.check_integrity()
    tier.remove(header.key)
    assert tier.stats().used_bytes == 0


def test_nothing_is_readable_before_commit(tier: Tier) -> None:
    header, payload = make(1)
    with tier.start(header.key, header.object_nbytes) as writer:
        writer.write(header.header_nbytes, payload)
        writer.write(0, encode(header))
        assert tier.get(header.key) is None
        assert not tier.contains(header.key)
        assert list(tier.keys()) == []
        assert writer.commit()
    assert read(tier, header.key) == payload


def test_leaving_a_writer_revokes(tier: Tier) -> None:
    header, payload = make(1)
    with pytest.raises(RuntimeError), tier.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        raise RuntimeError("the caller failed")
    with tier.start(header.key, header.object_nbytes) as idle:
        pass
    for ended in (writer, idle):
        ended.revoke()
        with pytest.raises(Closed):
            ended.write(0, b"x")
        with pytest.raises(Closed):
            ended.commit()
    assert tier.stats().used_bytes == 0
    assert tier.put(header, payload)
    tier.check_integrity()


def test_bytes_outside_an_object_are_refused(tier: Tier) -> None:
    header, _ = make(1)
    with tier.start(header.key, header.object_nbytes) as writer:
        for offset, data in ((-1, b"x"), (header.object_nbytes, b"x"), (header.object_nbytes - 1, b"xy")):
            with pytest.raises(InvalidInput, match="range"):
                writer.write(offset, data)


def test_an_incomplete_object_is_not_committed(tier: Tier) -> None:
    header, payload = make(1)
    for parts in ([(0, encode(header))], [(header.header_nbytes, payload)], [(0, encode(header)), (4100, payload[4:])]):
        with tier.start(header.key, header.object_nbytes) as writer:
            for offset, data in parts:
                writer.write(offset, data)
            with pytest.raises(ObjectCorrupt, match="never written"):
                writer.commit()
    assert tier.get(header.key) is None
    assert tier.stats().used_bytes == 0


def test_another_objects_header_is_not_committed(tier: Tier) -> None:
    header, payload = make(1)
    other, _ = make(2)
    writer = tier.start(header.key, header.object_nbytes)
    writer.write(0, encode(other))
    writer.write(header.header_nbytes, payload)
    with pytest.raises(ObjectCorrupt, match="key"):
        writer.commit()
    assert tier.stats().objects == 0
    assert tier.stats().used_bytes == 0


def test_wrong_bytes_are_never_handed_out(tier: Tier) -> None:
    header, payload = make(1)
    wrong = bytearray(payload)
    wrong[-1] ^= 1
    try:
        tier.put(header, wrong)
    except ObjectCorrupt:
        assert not tier.contains(header.key)
        return
    with pytest.raises(ObjectCorrupt):
        read(tier, header.key)
    assert tier.get(header.key) is None
    assert tier.put(header, payload)
    assert read(tier, header.key) == payload


def test_the_payload_must_have_the_headers_length(tier: Tier) -> None:
    header, payload = make(1)
    with pytest.raises(InvalidInput, match="payload"):
        tier.put(header, payload[:-2])
    for nbytes in (0, -1, 1.5, True):
        with pytest.raises(InvalidInput, match="nbytes"):
            tier.start(header.key, nbytes)  # type: ignore[arg-type]


def test_a_copy_is_kept(tier: Tier) -> None:
    header, payload = make(1)
    mutable = bytearray(payload)
    tier.put(header, mutable)
    mutable[:] = bytes(len(mutable))
    assert read(tier, header.key) == payload


def test_reading_into_the_callers_memory(tier: Tier) -> None:
    header, payload = make(1)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    with lease:
        room = np.zeros((header.layers, header.layer_nbytes // 2), np.uint16)
        view = lease.layer(1, into=room[1].data)
        assert view.readonly
        assert bytes(view) == room[1].tobytes() == payload[header.layer_nbytes : 2 * header.layer_nbytes]
        lease.payload(into=room.data)
        assert room.tobytes() == payload
        for wrong in (room[0].data, memoryview(payload), memoryview(bytearray(1))):
            with pytest.raises(InvalidInput, match="into"):
                lease.payload(into=wrong)


def test_hints_change_nothing(tier: Tier) -> None:
    header, payload = make(1)
    tier.expect([header.key])
    tier.put(header, payload)
    before = tier.stats()
    tier.expect([header.key, make(2)[0].key])
    assert tier.stats() == before
    lease = tier.get(header.key)
    assert lease is not None
    for layer in (0, header.layers - 1):
        lease.expect(layer, 1)
    assert bytes(lease.payload()) == payload
    lease.release()
    lease.expect(0, 1)


def test_a_source_fills_an_object_in_place(tier: Tier) -> None:
    header, payload = make(1)
    half = header.payload_nbytes // 2

    def source(start: int) -> Callable[[memoryview], None]:
        def fill(into: memoryview) -> None:
            into[:] = payload[start : start + half]

        return fill

    with tier.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        for start in (half, 0):
            writer.fill(header.header_nbytes + start, half, source(start))
        assert writer.commit()
    assert read(tier, header.key) == payload

    def broken(into: memoryview) -> None:
        raise RuntimeError("nothing to fill it with")

    with tier.start(make(2)[0].key, OBJECT_NBYTES) as writer:
        with pytest.raises(InvalidInput, match="range"):
            writer.fill(1, OBJECT_NBYTES, broken)
        with pytest.raises(RuntimeError):
            writer.fill(0, OBJECT_NBYTES, broken)
        with pytest.raises(Closed):
            writer.commit()
    assert tier.stats().used_bytes % header.object_nbytes == 0
    tier.check_integrity()


def test_a_released_lease_raises_and_its_views_stay_right(make_tier: MakeTier) -> None:
    tier = make_tier(2 * OBJECT_NBYTES)
    header, payload = make(1)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    view, array = lease.layer(1)[3:9], np.frombuffer(lease.payload(), np.uint8)
    lease.release()
    lease.release()
    for use in (lease.payload, lambda: lease.layer(0)):
        with pytest.raises(LeaseReleased):
            use()
    for seed in range(2, 8):  # as much memory as there is, over and over
        other, data = make(seed)
        try:
            tier.put(other, data)
        except ResourceExhausted:
            continue
        assert tier.stats().used_bytes <= tier.stats().capacity_bytes
    assert bytes(view) == payload[header.layer_nbytes + 3 : header.layer_nbytes + 9]
    assert array.tobytes() == payload
    tier.check_integrity()


@pytest.mark.parametrize("make_tier", ["host", "disk"], indirect=True)
def test_leases_pin_and_the_least_recently_used_goes_first(make_tier: MakeTier) -> None:
    tier = make_tier(3 * OBJECT_NBYTES)
    objects = [make(seed) for seed in range(5)]
    for header, payload in objects[:3]:
        tier.put(header, payload)
    assert read(tier, objects[0][0].key) is not None  # now 1 is the least recently used
    lease = tier.get(objects[1][0].key)
    assert lease is not None
    with lease:
        lease.payload()
        for _ in range(2):
            read(tier, objects[0][0].key)
        tier.put(*objects[3])
        assert [tier.contains(header.key) for header, _ in objects[:4]] == [True, True, False, True]
        tier.put(*objects[4])
        assert [tier.contains(header.key) for header, _ in objects] == [False, True, False, True, True]
        assert bytes(lease.payload()) == objects[1][1]
    assert tier.stats().evictions > 0
    tier.check_integrity()


def test_nothing_is_evicted_when_leases_hold_everything(make_tier: MakeTier) -> None:
    tier = make_tier(2 * OBJECT_NBYTES)
    objects = [make(seed) for seed in range(3)]
    tier.put(*objects[0])
    tier.put(*objects[1])
    leases = [tier.get(header.key) for header, _ in objects[:2]]
    # In a tier of tiers, the lower one keeps nothing pinned: hold it too.
    lower = [t.get(header.key) for t in getattr(tier, "tiers", ()) for header, _ in objects[:2]]
    with pytest.raises(ResourceExhausted):
        tier.put(*objects[2])
    assert all(tier.contains(header.key) for header, _ in objects[:2])
    for lease in (*leases, *lower):
        assert lease is not None
        lease.release()
    assert tier.put(*objects[2])
    tier.check_integrity()


def test_a_dropped_lease_is_a_released_one(make_tier: MakeTier) -> None:
    tier = make_tier(OBJECT_NBYTES)
    tier.put(*make(1))
    lease = tier.get(make(1)[0].key)
    assert lease is not None
    del lease
    gc.collect()
    assert tier.put(*make(2))


def test_pending_writers_count(make_tier: MakeTier) -> None:
    tier = make_tier(2 * OBJECT_NBYTES)
    keys = [make(seed)[0].key for seed in range(3)]
    with tier.start(keys[0], OBJECT_NBYTES), tier.start(keys[1], OBJECT_NBYTES):
        assert tier.stats().used_bytes == tier.stats().capacity_bytes
        with pytest.raises(ResourceExhausted):
            tier.start(keys[2], OBJECT_NBYTES)
        tier.check_integrity()
    tier.start(keys[2], 2 * OBJECT_NBYTES).revoke()


def test_an_object_larger_than_the_tier_is_refused(make_tier: MakeTier) -> None:
    tier = make_tier(OBJECT_NBYTES - 1)
    with pytest.raises(ResourceExhausted, match="larger"):
        tier.put(*make(1))
    assert tier.stats().used_bytes == 0


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_budget_is_a_positive_integer(make_tier: MakeTier, capacity: int) -> None:
    with pytest.raises(InvalidConfig, match="capacity_bytes"):
        make_tier(capacity)


def test_removal_is_at_once_and_leases_read_on(tier: Tier) -> None:
    header, payload = make(1)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    assert tier.remove(header.key)
    assert not tier.remove(header.key)
    assert tier.get(header.key) is None
    assert not tier.contains(header.key)
    assert tier.variants(header.key.content) == ()
    assert tier.stats().used_bytes == header.object_nbytes  # still reachable, still counted
    other = bytes(len(payload))
    assert tier.put(header.sealed(other), other)
    assert bytes(lease.payload()) == payload
    assert read(tier, header.key) == other
    lease.release()
    tier.remove(header.key)
    gc.collect()
    assert tier.stats().used_bytes == 0
    tier.check_integrity()


def test_variants_of_a_content_key(tier: Tier) -> None:
    plain, _ = make(1)
    conditioned = [make(1, neighbours=[str(n) * 40]) for n in range(2)]
    for header, payload in (make(1), *conditioned, make(2)):
        tier.put(header, payload)
    content = plain.key.content
    assert tier.variants(content) == tuple(sorted(["plain", *(header.key.variant for header, _ in conditioned)]))
    tier.remove(plain.key)
    tier.remove(conditioned[0][0].key)
    assert tier.variants(content) == (conditioned[1][0].key.variant,)
    assert read(tier, conditioned[1][0].key) == conditioned[1][1]
    with pytest.raises(InvalidInput, match="content"):
        tier.variants("../etc")
    tier.check_integrity()


def test_a_sensitivity_comes_back_with_the_header(make_tier: MakeTier) -> None:
    header, payload = make(1, tokens=1500, neighbours=["5" * 40], sensitive=True)
    assert header.header_nbytes > 12288
    tier = make_tier(4 * header.object_nbytes)
    assert tier.put(header, payload)
    for _ in range(2):
        lease = tier.get(header.key)
        assert lease is not None
        with lease:
            assert lease.header == header
            assert bytes(lease.payload()) == payload
    assert all(found == header for found in tier.headers([header.key]))
    tier.check_integrity()


def test_headers_are_told_without_a_use(make_tier: MakeTier) -> None:
    tier = make_tier(3 * OBJECT_NBYTES)
    (first, _), (second, _), (third, _), (absent, _) = objects = [make(seed) for seed in range(4)]
    for header, payload in objects[:3]:
        tier.put(header, payload)
    before = tier.stats()
    told = list(tier.headers([absent.key, first.key, third.key]))
    assert {header.key: header for header in told} == {first.key: first, third.key: third}
    assert tier.stats() == before
    assert list(tier.headers([])) == []
    tier.put(*make(9))
    assert not tier.contains(first.key), "it was still the least recently used one"
    assert list(tier.headers([first.key, second.key])) == [second]
    tier.close()
    with pytest.raises(Closed):
        tier.headers([second.key])


def test_keys_and_counts(tier: Tier) -> None:
    objects = [make(seed) for seed in range(4)]
    for header, payload in objects:
        tier.put(header, payload)
    assert sorted(tier.keys()) == sorted(header.key for header, _ in objects)
    for header, _ in objects[:3]:
        read(tier, header.key)
    tier.get(MISSING)
    stats = tier.stats()
    assert (stats.name, stats.objects, stats.hits, stats.misses) == (tier.name, 4, 3, 1)
    assert (stats.failures, stats.evictions, stats.quarantined) == (0, 0, 0)
    assert 4 * OBJECT_NBYTES <= stats.used_bytes <= stats.capacity_bytes


def test_a_closed_tier_says_so_and_leases_stay_good(tier: Tier) -> None:
    header, payload = make(1)
    tier.put(header, payload)
    lease = tier.get(header.key)
    writer = tier.start(make(2)[0].key, OBJECT_NBYTES)
    tier.close()
    tier.close()
    for use in (
        lambda: tier.get(header.key),
        lambda: tier.put(*make(3)),
        lambda: tier.contains(header.key),
        lambda: tier.remove(header.key),
        lambda: tier.variants(header.key.content),
        tier.keys,
        tier.stats,
        tier.check_integrity,
        lambda: tier.start(header.key, 1),
    ):
        with pytest.raises(Closed):
            use()
    assert lease is not None
    assert bytes(lease.payload()) == payload
    lease.release()
    with writer, pytest.raises(Closed):
        writer.write(0, encode(make(2)[0]))
        writer.write(make(2)[0].header_nbytes, make(2)[1])
        writer.commit()


def test_many_threads_keep_the_budget_and_the_bytes(make_tier: MakeTier) -> None:
    tier = make_tier(8 * OBJECT_NBYTES)
    objects = [make(seed) for seed in range(24)]
    stop = threading.Event()
    over: list[int] = []

    def watch() -> None:
        while not stop.wait(0.001):
            over.extend(
                t.stats().used_bytes
                for t in (tier, *getattr(tier, "tiers", ()))
                if t.stats().used_bytes > t.stats().capacity_bytes
            )

    def work(seed: int) -> int:
        rng, done = random.Random(seed), 0
        for _ in range(60):
            header, payload = rng.choice(objects)
            action = rng.random()
            try:
                if action < 0.45:
                    tier.put(header, payload)
                elif action < 0.55:
                    tier.remove(header.key)
                elif (found := read(tier, header.key)) is not None:
                    assert found == payload
                    done += 1
            except ResourceExhausted:
                pass  # the others' leases and writers hold everything: allowed
        return done

    watcher = threading.Thread(target=watch, name="budget watcher")
    watcher.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) > 0
    finally:
        stop.set()
        watcher.join()
    assert not over
    tier.check_integrity()
    for key in list(tier.keys()):
        assert tier.remove(key)
    gc.collect()
    assert tier.stats().used_bytes == 0
    assert tier.stats().failures == 0 or hasattr(tier, "tiers")


def test_one_key_from_many_threads_is_stored_once(tier: Tier) -> None:
    header, payload = make(1)
    with ThreadPoolExecutor(16) as pool:
        stored = list(pool.map(lambda _: tier.put(header, payload), range(32)))
    assert stored.count(True) == 1
    assert tier.stats().objects == 1
    tier.check_integrity()


def test_integrity_finds_what_does_not_add_up(make_tier: MakeTier) -> None:
    tier = make_tier(1 << 20)
    tier.put(*make(1))
    part = tier if isinstance(tier, (HostTier, DiskTier)) else tier.tiers[0]  # type: ignore[attr-defined]
    part._ledger._used += 1
    with pytest.raises(StoreError, match="ledger"):
        tier.check_integrity()

"""Quotas: what a tenant may hold of a tier, by its own objects alone, in every thread and process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from blend.config import StoreConfig
from blend.errors import InvalidConfig, ResourceExhausted
from blend.store import DiskTier, HostTier, Namespace, ObjectKey, Quotas, Tenants, Tier, TieredStore, open_store
from blend.store.directory import StoreDirectory
from blend.store.fileio import FileIO
from tests.store.helpers import OBJECT_NBYTES, make, read
from tests.store.quota_writer import CAPACITY, ONE, OTHER, QUOTA, QUOTAS, SECRET, work

MakeTier = Callable[[Quotas], Tier]


@pytest.fixture(params=["host", "disk"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTier:
    def maker(quotas: Quotas) -> Tier:
        if request.param == "host":
            return HostTier(CAPACITY, quotas=quotas)
        return DiskTier(tmp_path, CAPACITY, fsync=False, quotas=quotas)

    return maker


def held(tier: Tier, namespace: Namespace) -> int:
    """Return the bytes that a tenant holds."""
    tag = namespace.tag[:12]
    return sum(usage.used_bytes for usage in tier.tenants() if usage.tenant == tag)


def test_a_tenant_over_its_quota_evicts_its_own_oldest(make_tier: MakeTier) -> None:
    with make_tier(QUOTAS) as tier:
        for seed in range(4):
            tier.put(*make(seed, namespace=OTHER))
        for seed in range(3):
            tier.put(*make(seed, namespace=ONE))
        assert read(tier, make(0, namespace=ONE)[0].key)  # a use: the oldest is now the second
        tier.put(*make(3, namespace=ONE))
        assert sorted(tier.keys()) == sorted(
            [make(seed, namespace=ONE)[0].key for seed in (0, 2, 3)]
            + [make(seed, namespace=OTHER)[0].key for seed in range(4)]
        )
        assert (held(tier, ONE), held(tier, OTHER)) == (QUOTA, 4 * OBJECT_NBYTES)
        assert tier.stats().evictions == 1
        tier.check_integrity()


def test_another_model_of_the_tenant_counts_to_the_same_quota(make_tier: MakeTier) -> None:
    newer = Namespace("one", "ac" * 16, SECRET)
    with make_tier(QUOTAS) as tier:
        for seed in range(3):
            tier.put(*make(seed, namespace=ONE))
        tier.put(*make(0, namespace=newer))
        assert held(tier, newer) == held(tier, ONE) == QUOTA
        assert not tier.contains(make(0, namespace=ONE)[0].key)


def test_a_quota_that_is_held_is_an_error_that_says_so(make_tier: MakeTier) -> None:
    known = Tenants(SECRET)
    with make_tier(known.quotas(None, [("one", QUOTA)])) as tier:
        for seed in range(3):
            tier.put(*make(seed, namespace=ONE))
        tier.put(*make(0, namespace=OTHER))
        leases = [tier.get(make(seed, namespace=ONE)[0].key) for seed in range(2)]
        assert tier.pin(make(2, namespace=ONE)[0].key)
        with pytest.raises(ResourceExhausted) as refused:
            tier.put(*make(3, namespace=ONE))
        for word in ("'one'", ONE.tag, str(QUOTA), str(OBJECT_NBYTES), tier.name):
            assert word in str(refused.value)
        assert len(list(tier.keys())) == 4
        tier.put(*make(1, namespace=OTHER))  # nobody else's business
        leases[1].release()  # type: ignore[union-attr]
        tier.put(*make(3, namespace=ONE))
        assert tier.contains(make(0, namespace=ONE)[0].key)
        assert not tier.contains(make(1, namespace=ONE)[0].key)
        tier.check_integrity()


def test_what_is_removed_under_a_lease_counts_to_the_quota(make_tier: MakeTier) -> None:
    with make_tier(QUOTAS) as tier:
        tier.put(*make(0, namespace=ONE))
        lease = tier.get(make(0, namespace=ONE)[0].key)
        assert lease is not None
        tier.remove(lease.header.key)
        assert held(tier, ONE) == tier.lingering(ONE.tag) == OBJECT_NBYTES
        writers = [tier.start(make(seed, namespace=ONE)[0].key, OBJECT_NBYTES) for seed in (1, 2)]
        with pytest.raises(ResourceExhausted, match="quota"):
            tier.start(make(3, namespace=ONE)[0].key, OBJECT_NBYTES)
        lease.release()
        del lease
        writers.append(tier.start(make(3, namespace=ONE)[0].key, OBJECT_NBYTES))
        for writer in writers:
            writer.revoke()
        assert (held(tier, ONE), tier.lingering(ONE.tag)) == (0, 0)
        tier.check_integrity()


def test_pins_without_a_need_are_kept_and_softly_pinned_objects_go_last(make_tier: MakeTier) -> None:
    with make_tier(QUOTAS) as tier:
        for seed in range(3):
            tier.put(*make(seed, namespace=ONE))
        tier.pin(make(0, namespace=ONE)[0].key, 60.0)
        tier.put(*make(3, namespace=ONE))
        assert tier.contains(make(0, namespace=ONE)[0].key)
        tier.pin(make(2, namespace=ONE)[0].key)
        tier.pin(make(3, namespace=ONE)[0].key)
        tier.put(*make(4, namespace=ONE))
        assert not tier.contains(make(0, namespace=ONE)[0].key)


def test_an_object_larger_than_its_quota_is_refused(make_tier: MakeTier) -> None:
    with make_tier(Quotas(OBJECT_NBYTES - 1, QUOTAS.limits)) as tier:
        with pytest.raises(ResourceExhausted, match="larger than the whole quota of tenant"):
            tier.put(*make(0, namespace=OTHER))
        assert tier.put(*make(0, namespace=ONE))


def test_without_a_quota_a_tenant_may_fill_the_tier(make_tier: MakeTier) -> None:
    with make_tier(QUOTAS) as tier:
        tier.put(*make(0, namespace=ONE))
        for seed in range(20):
            tier.put(*make(seed, namespace=OTHER))
        assert held(tier, OTHER) == CAPACITY  # for the budget the oldest goes, whoever's
        assert [usage.quota_bytes for usage in tier.tenants()] == [None]


@pytest.mark.parametrize("kind", ["host", "disk", "tiered"])
def test_many_threads_never_exceed_a_quota(kind: str, tmp_path: Path) -> None:
    namespaces = [Namespace(f"tenant {number}", "0f" * 16, SECRET) for number in range(5)]
    quotas = Tenants(SECRET).quotas(3 * OBJECT_NBYTES, [("tenant 0", 5 * OBJECT_NBYTES)])
    tiers: list[Tier] = []
    if kind != "disk":
        tiers.append(HostTier(CAPACITY, quotas=quotas))
    if kind != "host":
        tiers.append(DiskTier(tmp_path, CAPACITY, fsync=False, quotas=quotas))
    peaks = [watch(tier) for tier in tiers]
    store = TieredStore(tiers)
    wrong: list[str] = []

    def run(seed: int) -> None:
        for step in range(60):
            header, payload = make((seed * 7 + step * 5) % 12, namespace=namespaces[(seed + step) % 5])
            try:
                store.put(header, payload)
            except ResourceExhausted as error:
                if "quota" not in str(error) and "no room" not in str(error) and "in one piece" not in str(error):
                    wrong.append(str(error))
            lease = store.get(header.key)
            if lease is not None:
                with lease:
                    if bytes(lease.payload()) != payload:
                        wrong.append(str(header.key))
            if step % 9 == 0:
                store.remove(header.key)

    threads = [threading.Thread(target=run, args=(seed,), name=f"putter {seed}") for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for peak in peaks:
        assert len(peak) == len(namespaces)
        for tenant, nbytes in peak.items():
            limit = quotas.limit(tenant)
            assert limit is not None
            assert 0 < nbytes <= limit
        assert any(nbytes == quotas.limit(tenant) for tenant, nbytes in peak.items())
    store.check_integrity()
    store.close()


def watch(tier: Tier) -> dict[str, int]:
    """Return a dictionary that follows the most bytes that each tenant has held, looked at whenever bytes are taken."""
    ledger = tier._ledger  # type: ignore[attr-defined]
    peak: dict[str, int] = {}
    count = ledger.count_reserved

    def counted(key: ObjectKey, nbytes: int) -> None:
        count(key, nbytes)
        for tenant, share in ledger._shares.items():
            peak[tenant] = max(peak.get(tenant, 0), share)

    ledger.count_reserved = counted
    return peak


def spent(directory: Path, namespace: Namespace) -> int:
    """Return the bytes of a tenant's files while nobody changes them."""
    tag = namespace.tag[:12]
    with open(directory / "ledger", "rb") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        contents = StoreDirectory(directory, FileIO(), False).scan()
    return contents.shares[tag]


def test_two_processes_keep_one_quota(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.store.quota_writer", str(tmp_path), "2", "500"], cwd=Path(__file__).parents[2]
    )
    seen: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.002):
            seen.append(spent(tmp_path, ONE))

    DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS).close()
    watcher = threading.Thread(target=look, name="quota watcher")
    watcher.start()
    puts = 0
    try:
        while other.poll() is None:
            puts += work(str(tmp_path), seed=puts, steps=150)
    finally:
        stop.set()
        watcher.join()
        assert other.wait(timeout=60) == 0
    assert puts
    assert max(seen) == QUOTA  # reached, and never exceeded
    with DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS) as tier:
        for namespace in (ONE, OTHER):
            assert held(tier, namespace) == spent(tmp_path, namespace)
        tier.check_integrity()


def test_room_within_a_quota_is_made_by_what_another_process_put(tmp_path: Path) -> None:
    one, other = (DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS) for _ in range(2))
    for seed in range(3):
        one.put(*make(seed, namespace=ONE))
    assert other.put(*make(3, namespace=ONE))
    assert held(one, ONE) == held(other, ONE) == QUOTA == spent(tmp_path, ONE)
    leases = [tier.get(key) for tier in (one, other) for key in list(one.keys())]
    assert len([lease for lease in leases if lease is not None]) == 6
    assert other.put(*make(4, namespace=OTHER))
    for tier in (one, other):
        tier.check_integrity()
        tier.close()


def test_after_a_restart_usage_is_right_and_a_lowered_quota_holds(tmp_path: Path) -> None:
    with DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS) as tier:
        for seed in range(3):
            tier.put(*make(seed, namespace=ONE))
            os.utime(next(tmp_path.rglob(str(make(seed, namespace=ONE)[0].key))), (seed + 1, seed + 1))
            tier.put(*make(seed, namespace=OTHER))
    with DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS) as tier:
        assert (held(tier, ONE), held(tier, OTHER)) == (3 * OBJECT_NBYTES, 3 * OBJECT_NBYTES)
    lowered = Quotas(limits={ONE.tag[:12]: OBJECT_NBYTES})
    with DiskTier(tmp_path, CAPACITY, fsync=False, quotas=lowered) as tier:
        assert (held(tier, ONE), held(tier, OTHER)) == (OBJECT_NBYTES, 3 * OBJECT_NBYTES)
        assert tier.contains(make(2, namespace=ONE)[0].key)
        tier.check_integrity()
    with DiskTier(tmp_path, CAPACITY, fsync=False) as tier:  # one that enforces none
        for seed in range(5):
            tier.put(*make(seed, namespace=ONE))
        assert held(tier, ONE) == 5 * OBJECT_NBYTES


HOLD = """
import sys
from tests.store.quota_writer import CAPACITY, ONE, QUOTAS
from tests.store.helpers import OBJECT_NBYTES, make
from blend.store import DiskTier
tier = DiskTier(sys.argv[1], CAPACITY, fsync=False, quotas=QUOTAS)
writers = [tier.start(make(seed, namespace=ONE)[0].key, OBJECT_NBYTES) for seed in range(3)]
sys.stdout.write("ready")
sys.stdout.flush()
sys.stdin.read()
"""


def test_what_a_killed_process_had_reserved_is_within_the_quota_again(tmp_path: Path) -> None:
    survivor = DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        with pytest.raises(ResourceExhausted, match="quota"):
            survivor.put(*make(9, namespace=ONE))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    for seed in range(4):
        assert survivor.put(*make(seed, namespace=ONE))
    assert held(survivor, ONE) == QUOTA
    survivor.check_integrity()


@pytest.mark.parametrize("at", [56, 60, 66, 72, -1])
def test_a_damaged_row_of_the_ledger_is_measured_anew(tmp_path: Path, at: int) -> None:
    tiers = [DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS) for _ in range(2)]
    for seed in range(2):
        tiers[seed].put(*make(seed, namespace=ONE))
        tiers[seed].put(*make(seed, namespace=OTHER))
    raw = bytearray((tmp_path / "ledger").read_bytes())
    raw[at] ^= 0x40
    (tmp_path / "ledger").write_bytes(raw)
    for tier in tiers:
        assert (held(tier, ONE), held(tier, OTHER)) == (2 * OBJECT_NBYTES, 2 * OBJECT_NBYTES)
    for seed in range(2, 5):
        tiers[seed % 2].put(*make(seed, namespace=ONE))
        assert held(tiers[0], ONE) == held(tiers[1], ONE) == QUOTA == spent(tmp_path, ONE)
    for tier in tiers:
        tier.check_integrity()


def test_what_is_corrupt_goes_first_for_its_own_tenant(tmp_path: Path) -> None:
    with DiskTier(tmp_path, CAPACITY, fsync=False, quotas=QUOTAS) as tier:
        for seed in range(3):
            tier.put(*make(seed, namespace=ONE))
        header, payload = make(0, namespace=OTHER)
        tier.put(header, payload)
        for damaged in (header, make(1, namespace=ONE)[0]):
            path = next(tmp_path.rglob(str(damaged.key)))
            path.write_bytes(b"\0" * OBJECT_NBYTES)
            with pytest.raises(Exception, match="magic"):
                tier.get(damaged.key)
        assert tier.stats().quarantined == 2
        assert held(tier, ONE) == QUOTA
        tier.put(*make(3, namespace=ONE))
        assert tier.stats().quarantined == 1
        assert all(tier.contains(make(seed, namespace=ONE)[0].key) for seed in (0, 2, 3))


def test_settings_become_quotas_of_both_tiers(tmp_path: Path) -> None:
    config = StoreConfig(
        directory=tmp_path,
        secret=SECRET,
        fsync=False,
        tenant_quota_bytes=OBJECT_NBYTES,
        tenant_quotas=(("one", 2 * OBJECT_NBYTES),),
    )
    store, _ = open_store(config)
    with store:
        for seed in range(4):
            store.put(*make(seed, namespace=ONE))
            store.put(*make(seed, namespace=OTHER))
        for tier in store.tiers:
            assert (held(tier, ONE), held(tier, OTHER)) == (2 * OBJECT_NBYTES, OBJECT_NBYTES)
        assert {usage.quota_bytes for usage in store.tenants()} == {OBJECT_NBYTES, 2 * OBJECT_NBYTES}
        assert {store.known.name(usage.tenant) for usage in store.tenants()} == {"one", None}
    assert Quotas.decode((tmp_path / "quotas").read_text()).limit(ONE.tag[:12]) == 2 * OBJECT_NBYTES
    store, _ = open_store(StoreConfig(directory=tmp_path, secret=SECRET, fsync=False))
    store.close()
    assert not (tmp_path / "quotas").exists()


@pytest.mark.parametrize("write", ["write_through_selective", "write_back"])
def test_other_write_policies_keep_quotas_too(tmp_path: Path, write: str) -> None:
    config = StoreConfig(
        directory=tmp_path, secret=SECRET, fsync=False, write_policy=write, tenant_quota_bytes=2 * OBJECT_NBYTES
    )
    store, _ = open_store(config)
    with store:
        for seed in range(6):
            store.put(*make(seed, namespace=ONE))
            assert read(store, make(seed, namespace=ONE)[0].key) == make(seed, namespace=ONE)[1]
        store.wait_idle(10)
        for tier in store.tiers:
            assert held(tier, ONE) <= 2 * OBJECT_NBYTES
        store.check_integrity()


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant_quota_bytes": 0},
        {"tenant_quota_bytes": 1.5},
        {"tenant_quota_bytes": True},
        {"tenant_quotas": {"one": 1}},
        {"tenant_quotas": (("one",),)},
        {"tenant_quotas": (("one", 0),)},
        {"tenant_quotas": (("", 1),)},
        {"tenant_quotas": (("x" * 129, 1),)},
        {"tenant_quotas": (("\ud800", 1),)},
        {"tenant_quotas": ((5, 1),)},
        {"tenant_quotas": (("one", 1), ("one", 2))},
    ],
)
def test_wrong_quotas_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match=r"store\.tenant_quota"):
        StoreConfig(**changes)  # type: ignore[arg-type]


def test_names_are_remembered_within_bounds() -> None:
    known = Tenants(SECRET, limit=2)
    tags = [known.learn(name) for name in ("a", "b", "a", "c")]
    assert [known.name(tag) for tag in tags] == ["a", None, "a", "c"]
    assert known.describe(tags[1]) == f"tenant {tags[1]}"
    assert known.describe(tags[0]) == f"tenant 'a' ({tags[0]})"


def test_a_note_of_quotas_survives_what_is_no_line_of_it() -> None:
    quotas = Quotas(5, {"0f" * 6: 7})
    assert Quotas.decode(quotas.encode() + "default much\nnonsense\n") == quotas
    assert Quotas.decode("") == Quotas()

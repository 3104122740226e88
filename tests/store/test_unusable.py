"""Directories that cannot be used as they are: read-only, foreign, newer, too small, open to others. Errors say why."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blend.config import StoreConfig
from blend.errors import BlendError, InvalidConfig, ResourceExhausted, TierUnavailable
from blend.store import DiskTier, HostTier, Terms, TieredStore, open_store
from tests.store.helpers import OBJECT_NBYTES, FaultyIO, make, path_of, read

WRITES = ("create", "pwrite", "fsync", "rename", "unlink", "mkdir", "truncate", "write_record")
READS = ("open", "pread", "find", "read_record")


class ReadOnlyIO(FaultyIO):
    """A file system that takes no change: what exists can be opened and read."""

    armed = True

    def open(self, path: str, flags: int) -> int:
        if self.armed and (flags & os.O_ACCMODE != os.O_RDONLY or (flags & os.O_CREAT and not os.path.exists(path))):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return super().open(path, flags)

    def arm(self, on: bool) -> None:
        self.armed = on
        self.faults = dict.fromkeys(WRITES, errno.EROFS) if on else {}


@contextmanager
def told(code: int, *words: str) -> Iterator[None]:
    """Let a fault pass that says what the system said, and these words."""
    try:
        yield
    except TierUnavailable as error:
        if not all(word in str(error) for word in (errno.errorcode[code], *words)):
            raise


def test_a_store_that_becomes_read_only_is_read_on(tmp_path: Path) -> None:
    """Nothing is lost and nothing is refused that needs no writing; it is all there when it can be written again."""
    io = ReadOnlyIO()
    io.arm(False)
    store = TieredStore([HostTier(2 * OBJECT_NBYTES), DiskTier(tmp_path, 1 << 20, fsync=False, io=io)])
    objects = [make(seed) for seed in range(5)]
    for header, payload in objects:
        store.put(header, payload)
    io.arm(True)
    for header, payload in objects:
        assert read(store, header.key) == payload
        assert store.contains(header.key)
    with store.load([header.key for header, _ in objects]) as loads:
        assert all(bytes(loads[header.key].payload()) == payload for header, payload in objects)
    fresh, data = make(9)
    assert store.put(fresh, data)  # the host takes it
    with pytest.raises(TierUnavailable, match="EROFS"):
        store.tiers[1].put(*make(10))
    with pytest.raises(TierUnavailable, match="EROFS"):
        store.remove(objects[0][0].key)
    assert read(store, objects[0][0].key) == objects[0][1]
    io.arm(False)
    store.check_integrity()
    assert store.remove(objects[0][0].key)
    assert not store.put(fresh, data)
    assert read(store.tiers[1], fresh.key) == data
    store.close()
    with DiskTier(tmp_path, 1 << 20, fsync=False) as disk:
        assert len(list(disk.keys())) == 5
        disk.check_integrity()


def test_a_read_only_directory_is_refused_at_the_start_and_left_alone(tmp_path: Path) -> None:
    for name, prepared in (("new", False), ("used", True)):
        directory = tmp_path / name
        directory.mkdir(mode=0o700)
        if prepared:
            with DiskTier(directory, 1 << 20, fsync=False) as disk:
                disk.put(*make(1))
        before = sorted(directory.rglob("*"))
        io = ReadOnlyIO()
        io.arm(True)
        with pytest.raises(TierUnavailable, match=r"EROFS \(Read-only file system\)"):
            DiskTier(directory, 1 << 20, io=io)
        assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("call", [*WRITES, *READS])
def test_whatever_fails_at_the_start_is_one_typed_error(tmp_path: Path, call: str, code: int) -> None:
    """A directory with objects in it; nothing of it is lost, whether it starts or not."""
    objects = [make(seed) for seed in range(3)]
    with DiskTier(tmp_path, 1 << 20, fsync=False) as disk:
        for header, payload in objects:
            disk.put(header, payload)
    for after in range(4):
        io = FaultyIO()
        io.faults, io.after = {call: code}, after
        with told(code, str(tmp_path)):
            disk = DiskTier(tmp_path, 1 << 20, io=io)
            io.faults = {}
            disk.close()
    with DiskTier(tmp_path, 1 << 20, fsync=False) as disk:
        assert all(read(disk, header.key) == payload for header, payload in objects)
        assert disk.stats().used_bytes == 3 * OBJECT_NBYTES
        disk.check_integrity()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", READS)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_whatever_fails_while_reading_costs_that_read(tmp_path: Path, call: str, code: int, after: int) -> None:
    io = FaultyIO()
    store = TieredStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20, fsync=False, io=io)])
    header, payload = make(1)
    store.put(header, payload)
    store.tiers[0].remove(header.key)
    io.faults, io.after = {call: code}, after
    found = store.lookup(header.key)
    if found.lease is not None:
        with found.lease as lease, told(code):
            assert bytes(lease.payload()) == payload
    else:
        assert errno.errorcode[code] in found.reason
    with store.load([header.key]) as loads:
        for lease in loads.values():
            with told(code):
                assert bytes(lease.payload()) == payload
    io.faults = {}
    assert store.tier_stats()[1].quarantined == 0, "a fault of the device is no fault of the object"
    assert read(store, header.key) == payload
    store.check_integrity()
    store.close()


def test_a_newer_layout_and_a_foreign_owner_through_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StoreConfig(host_bytes=1 << 20, disk_bytes=1 << 20, directory=tmp_path / "store")
    store, _ = open_store(config)
    store.put(*make(1))
    store.close()
    (tmp_path / "store" / "layout").write_text("blend-store 7\n")
    with pytest.raises(TierUnavailable, match="layout 7, but this version reads 1; use the version that wrote it"):
        open_store(config)
    (tmp_path / "store" / "layout").write_text("blend-store 1\n")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(TierUnavailable, match=f"belongs to user {own}.*give a directory of your own"):
        open_store(config)
    monkeypatch.undo()
    store, _ = open_store(config)
    assert read(store, make(1)[0].key) == make(1)[1]
    store.close()


def test_a_budget_below_one_object_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    for tiers in (
        [HostTier(OBJECT_NBYTES - 1)],
        [DiskTier(tmp_path / "disk", OBJECT_NBYTES - 1, fsync=False)],
        [HostTier(1), DiskTier(tmp_path / "both", 1, fsync=False)],
    ):
        with TieredStore(tiers) as store:  # type: ignore[arg-type]
            with pytest.raises(
                ResourceExhausted, match=rf"an object of {OBJECT_NBYTES} bytes is larger than the whole"
            ):
                store.put(*make(1))
            events = store.put_async(*make(1))
            for event in (events.readable, events.durable):
                with pytest.raises(ResourceExhausted, match="larger"):
                    event.result(30)
            assert store.stats().used_bytes == 0
            assert store.get(make(1)[0].key) is None
            store.check_integrity()
    assert [path for path in tmp_path.glob("*/objects/**/*") if path.is_file()] == []


def test_an_object_that_fits_below_the_budget_but_above_a_watermark_is_taken(tmp_path: Path) -> None:
    terms = Terms(high_watermark=0.5, low_watermark=0.25)
    for tier in (
        HostTier(OBJECT_NBYTES, terms=terms),
        DiskTier(tmp_path, OBJECT_NBYTES, fsync=False, terms=terms),
    ):
        for seed in range(3):
            assert tier.put(*make(seed))
            assert read(tier, make(seed)[0].key) == make(seed)[1]
        tier.check_integrity()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"write_policy": "write-through"}, "store.write_policy"),
        ({"write_policy": ""}, "store.write_policy"),
        ({"prefetch_policy": "WAIT_COMPLETE"}, "store.prefetch_policy"),
        ({"host_bytes": 0, "disk_bytes": 0}, "store.host_bytes"),
        ({"disk_bytes": -1}, "store.disk_bytes"),
    ],
)
def test_unknown_policies_are_named_with_those_that_there_are(settings: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field) as raised:
        StoreConfig(**settings)  # type: ignore[arg-type]
    if field.endswith("policy"):
        assert "write_through_selective" in str(raised.value) or "best_effort" in str(raised.value)


def test_everything_in_a_store_stays_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    """Objects, those being written, quarantine, ledger, sessions, mark and secret; after evictions and faults too."""
    old = os.umask(0)
    try:
        config = StoreConfig(host_bytes=0, disk_bytes=3 * OBJECT_NBYTES, directory=tmp_path / "a" / "store")
        store, _ = open_store(config)
        directory = tmp_path / "a" / "store"
        for seed in range(6):
            store.put(*make(seed))
        corrupt = make(5)[0]
        path_of(directory, corrupt).write_bytes(b"x" * OBJECT_NBYTES)
        with pytest.raises(BlendError):
            store.get(corrupt.key)
        with store.start(make(20)[0].key, OBJECT_NBYTES):
            seen = [directory.parent, directory, *directory.rglob("*")]
            assert {path.name for path in seen} >= {"secret", "layout", "ledger", "sessions", "quarantine"}
            assert any(path.name.endswith(".tmp") for path in seen)
            for path in seen:
                assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        store.close()
    finally:
        os.umask(old)


@pytest.mark.parametrize("name", ["objects", "quarantine"])
def test_a_link_in_place_of_a_directory_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    """A store does not follow a link out of its directory to remove or replace what is there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    (directory / name).symlink_to(outside)
    try:
        with DiskTier(directory, 2 * OBJECT_NBYTES, fsync=False) as disk:
            for seed in range(4):
                disk.put(*make(seed))
    except TierUnavailable:
        pass
    assert (outside / "mine").read_text() == "mine"

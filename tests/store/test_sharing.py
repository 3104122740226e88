"""Several tiers on one directory, as several processes have them: one set of objects and one budget."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blend.errors import ResourceExhausted, TierUnavailable
from blend.store import DiskTier, HostTier, TieredStore, encode, fileio
from tests.store.helpers import BROKEN, OBJECT_NBYTES, FaultyIO, make, path_of, read

ROOM = 4 * OBJECT_NBYTES


@pytest.fixture
def pair(tmp_path: Path) -> tuple[DiskTier, DiskTier]:
    return DiskTier(tmp_path, ROOM, fsync=False), DiskTier(tmp_path, ROOM, fsync=False)


def spent(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "objects").rglob("*") if path.is_file())


def test_what_another_tier_put_is_found(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    objects = [make(1), make(1, neighbours=["8" * 40]), make(2)]
    for header, payload in objects:
        assert one.put(header, payload)
    content = objects[0][0].key.content
    assert other.variants(content) == one.variants(content) == (objects[1][0].key.variant, "plain")
    assert other.contains(objects[2][0].key)
    assert read(other, objects[0][0].key) == objects[0][1]
    assert sorted(other.keys()) == sorted(header.key for header, _ in objects)
    assert not other.put(*objects[2])
    store = TieredStore([HostTier(ROOM), other])
    assert store.resolve(content, "best") == objects[1][0].key
    for tier in pair:
        tier.check_integrity()
        assert tier.stats().used_bytes == 3 * OBJECT_NBYTES


def test_a_new_variant_is_found_however_the_clock_moves(
    pair: tuple[DiskTier, DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    content = make(1)[0].key.content
    now = time.time_ns()
    for step, neighbours in enumerate([(), ("8" * 40,), ("9" * 40,)]):
        monkeypatch.setattr(time, "time_ns", lambda step=step: now + (-1) ** step * 3600 * 10**9)
        one.put(*make(1, neighbours=neighbours))
        assert len(other.variants(content)) == step + 1
        assert other.variants(content) == one.variants(content)


@pytest.mark.parametrize("held", [True, False])
def test_what_another_tier_removed_is_a_miss(pair: tuple[DiskTier, DiskTier], held: bool) -> None:
    one, other = pair
    header, payload = make(1)
    one.put(header, payload)
    lease = one.get(header.key) if held else None
    assert other.remove(header.key)
    for look in (one.contains, one.get, other.contains):
        assert not look(header.key)
    assert one.variants(header.key.content) == ()
    assert not one.remove(header.key)
    if lease is not None:
        assert bytes(lease.payload()) == payload
    assert one.put(header, payload)
    assert read(other, header.key) == payload
    one.check_integrity()
    other.check_integrity()


def test_all_tiers_share_one_budget(pair: tuple[DiskTier, DiskTier], tmp_path: Path) -> None:
    for seed in range(20):
        assert pair[seed % 2].put(*make(seed))
        assert spent(tmp_path) <= ROOM
        assert pair[0].stats().used_bytes == pair[1].stats().used_bytes == spent(tmp_path)
    writers = [pair[0].start(make(30 + n)[0].key, OBJECT_NBYTES) for n in range(3)]
    assert pair[1].put(*make(40))
    with pytest.raises(ResourceExhausted):
        pair[1].start(make(41)[0].key, 2 * OBJECT_NBYTES)
    for writer in writers:
        writer.revoke()
    assert pair[1].put(*make(42))
    for tier in pair:
        tier.check_integrity()


def test_room_is_made_by_what_others_put(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    for seed in range(4):
        one.put(*make(seed))
    assert other.put(*make(9))
    assert read(other, make(9)[0].key) == make(9)[1]
    assert one.stats().used_bytes == ROOM


def test_the_first_of_several_processes_to_commit_stays(pair: tuple[DiskTier, DiskTier]) -> None:
    header, payload = make(1)
    late = bytes(len(payload))
    writers = [tier.start(header.key, header.object_nbytes) for tier in pair]
    for writer, sealed, data in zip(writers, (header, header.sealed(late)), (payload, late), strict=True):
        writer.write(0, encode(sealed))
        writer.write(header.header_nbytes, data)
    assert [writer.commit() for writer in writers] == [True, False]
    assert all(read(tier, header.key) == payload for tier in pair)
    assert pair[0].stats().used_bytes == OBJECT_NBYTES


def test_what_is_removed_under_a_lease_counts_until_it_ends(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    one.put(*make(1))
    lease = one.get(make(1)[0].key)
    assert lease is not None
    one.remove(make(1)[0].key)
    assert other.stats().used_bytes == OBJECT_NBYTES
    lease.release()
    assert one.stats().used_bytes == other.stats().used_bytes == 0
    one.put(*make(2))
    lease = one.get(make(2)[0].key)
    one.remove(make(2)[0].key)
    one.close()
    assert other.stats().used_bytes == 0


def test_what_only_its_reader_knows_of_outlives_another_ones_measuring(
    pair: tuple[DiskTier, DiskTier], tmp_path: Path
) -> None:
    one, other = pair
    one.put(*make(1))
    lease = one.get(make(1)[0].key)
    assert lease is not None
    one.remove(make(1)[0].key)
    (tmp_path / "ledger").write_bytes(b"damaged")
    assert other.stats().used_bytes == 0
    assert one.stats().used_bytes == other.stats().used_bytes == OBJECT_NBYTES
    lease.release()
    assert one.stats().used_bytes == other.stats().used_bytes == 0
    other.put(*make(2))
    assert one.stats().used_bytes == OBJECT_NBYTES
    for tier in pair:
        tier.check_integrity()


HOLD = """
import sys
from blend.store import DiskTier
from tests.store.helpers import OBJECT_NBYTES, make
tier = DiskTier(sys.argv[1], 4 * OBJECT_NBYTES, fsync=False)
tier.put(*make(1))
writers = [tier.start(make(seed)[0].key, OBJECT_NBYTES) for seed in (2, 3)]
writers[0].write(0, b"x" * 100)
sys.stdout.write("ready")
sys.stdout.flush()
sys.stdin.read()
"""


def test_what_a_killed_process_had_reserved_is_free_again(tmp_path: Path) -> None:
    survivor = DiskTier(tmp_path, ROOM, fsync=False)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        assert survivor.stats().used_bytes == 3 * OBJECT_NBYTES
        with pytest.raises(ResourceExhausted):
            survivor.start(make(9)[0].key, 3 * OBJECT_NBYTES)  # the living one's reservations hold
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    with survivor.start(make(9)[0].key, 4 * OBJECT_NBYTES):
        assert survivor.stats().used_bytes == ROOM
        assert not list(tmp_path.glob("sessions/*.tmp"))
    assert survivor.stats().used_bytes == 0
    survivor.check_integrity()


def _damaged(path: Path) -> None:
    path.write_bytes(b"x" * 32)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _wrong(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[8] ^= 0x40
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [_damaged, _emptied, _wrong, Path.unlink])
def test_a_damaged_record_is_measured_anew(
    pair: tuple[DiskTier, DiskTier], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    pair[0].put(*make(1))
    damage(tmp_path / "ledger")
    for tier in pair:
        assert tier.stats().used_bytes == OBJECT_NBYTES
    pair[1].put(*make(2))
    assert [tier.stats().used_bytes for tier in pair] == [2 * OBJECT_NBYTES] * 2
    assert DiskTier(tmp_path, ROOM).stats().used_bytes == 2 * OBJECT_NBYTES


@pytest.mark.parametrize("call", ["read_record", "write_record", "wait_lock", "truncate"])
def test_a_record_that_cannot_be_used_is_a_fault(tmp_path: Path, call: str) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, ROOM, fsync=False, io=io)
    tier.put(*make(1))
    io.faults = {call: BROKEN}
    with pytest.raises(TierUnavailable, match="EIO"):
        tier.put(*make(2))
    assert read(tier, make(1)[0].key) == make(1)[1]
    io.faults = {}
    assert tier.stats().used_bytes == OBJECT_NBYTES
    assert tier.put(*make(2))
    tier.check_integrity()


def test_a_process_that_keeps_the_lock_is_not_waited_for_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, ROOM, fsync=False)
    tier.put(*make(1))
    monkeypatch.setattr(fileio, "LOCK_SECONDS", 0.02)
    with open(tmp_path / "ledger", "rb") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(TierUnavailable, match="ETIMEDOUT"):
            tier.put(*make(2))
        assert read(tier, make(1)[0].key) == make(1)[1]
    assert tier.put(*make(2))
    tier.check_integrity()


def test_files_that_came_or_went_by_hand_are_counted_right(tmp_path: Path) -> None:
    source = DiskTier(tmp_path / "source", ROOM, fsync=False)
    source.put(*make(1))
    tier = DiskTier(tmp_path / "store", ROOM, fsync=False)
    tier.put(*make(2))
    path_of(tmp_path / "store", make(2)[0]).unlink()
    target = path_of(tmp_path / "store", make(1)[0])
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(path_of(tmp_path / "source", make(1)[0]).read_bytes())
    assert not tier.contains(make(2)[0].key)
    assert read(tier, make(1)[0].key) == make(1)[1]
    assert tier.stats().used_bytes == OBJECT_NBYTES
    tier.check_integrity()

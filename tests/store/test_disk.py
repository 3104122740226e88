"""The disk tier beyond the contract: faults, corruption, restarts, what lies in its directory."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blend.errors import ObjectCorrupt, StoreError, TierUnavailable
from blend.store import LAYOUT_VERSION, DiskTier, Namespace, encode
from tests.store.helpers import BROKEN, FORBIDDEN, NO_SPACE, OBJECT_NBYTES, READ_ONLY, FaultyIO, make, path_of, read

ONCE_A_PUT = ("rename", "pread", "truncate")
"""System calls that a put makes no second time."""


def files(directory: Path, under: str = "objects") -> list[Path]:
    return sorted(path for path in (directory / under).rglob("*") if path.is_file())


def test_files_are_the_owners_alone_and_named_by_their_key(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "store"
    tier = DiskTier(directory, 1 << 20)
    header, payload = make(1)
    tier.put(header, payload)
    assert files(directory) == [path_of(directory, header)]
    assert path_of(directory, header).read_bytes() == encode(header) + payload
    assert (directory / "layout").read_text() == "blend-store 1\n"
    for path in (directory, *directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("fsync", [True, False])
def test_objects_are_there_after_a_restart(tmp_path: Path, fsync: bool) -> None:
    objects = [make(seed) for seed in range(3)] + [make(1, neighbours=["7" * 40])]
    with DiskTier(tmp_path, 1 << 20, fsync=fsync) as tier:
        for header, payload in objects:
            tier.put(header, payload)
    with DiskTier(tmp_path, 1 << 20) as tier:
        assert sorted(tier.keys()) == sorted(header.key for header, _ in objects)
        assert len(tier.variants(objects[1][0].key.content)) == 2
        for header, payload in objects:
            assert read(tier, header.key) == payload
        tier.check_integrity()


def test_headers_are_read_without_payloads_and_what_is_corrupt_is_left_out(tmp_path: Path) -> None:
    objects = [make(seed) for seed in range(3)]
    with DiskTier(tmp_path, 1 << 20) as tier:
        for header, payload in objects:
            tier.put(header, payload)
    for number, at in ((0, 200), (1, -1)):  # a bit of one's header, and one of another's payload
        path = path_of(tmp_path, objects[number][0])
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
    with DiskTier(tmp_path, 1 << 20) as tier:
        told = {header.key: header.token_ids for header in tier.headers(list(tier.keys()))}
        assert told == {header.key: header.token_ids for header, _ in objects[1:]}
        assert tier.stats().quarantined == 1
        tier.check_integrity()


def test_starting_up_over_budget_evicts_the_oldest(tmp_path: Path) -> None:
    objects = [make(seed) for seed in range(4)]
    with DiskTier(tmp_path, 1 << 20) as tier:
        for age, (header, payload) in enumerate(objects):
            tier.put(header, payload)
            os.utime(path_of(tmp_path, header), (1_000_000 - age, 1_000_000 - age))
    with DiskTier(tmp_path, 2 * OBJECT_NBYTES) as tier:
        assert [tier.contains(header.key) for header, _ in objects] == [True, True, False, False]
        assert len(files(tmp_path)) == 2
        tier.check_integrity()


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    header, payload = make(1)
    with DiskTier(tmp_path, 1 << 20) as tier:
        tier.put(header, payload)
    folder = path_of(tmp_path, header).parent
    strangers = [folder / "notes.txt", tmp_path / "objects" / "readme", tmp_path / "objects" / "zz" / str(header.key)]
    (tmp_path / "objects" / "zz").mkdir()
    for path in strangers:
        path.write_text("mine")
    (folder / str(make(2)[0].key)).symlink_to("/etc/passwd")
    (folder / str(make(3)[0].key)).mkdir()
    with DiskTier(tmp_path, 1 << 20) as tier:
        assert list(tier.keys()) == [header.key]
    assert all(path.read_text() == "mine" for path in strangers)


def test_only_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    header, payload = make(1)
    live = DiskTier(tmp_path, 1 << 20)
    with live.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        dead = path_of(tmp_path, header).with_name(f"{header.key}.0123456789abcdef.tmp")
        dead.write_bytes(b"half an obj")
        with DiskTier(tmp_path, 1 << 20) as other:
            assert not dead.exists()
            assert other.stats().objects == 0
        writer.write(header.header_nbytes, payload)
        assert writer.commit()
    assert read(live, header.key) == payload


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("pwrite", NO_SPACE),
        ("pwrite", BROKEN),
        ("fsync", BROKEN),
        ("fsync", NO_SPACE),
        ("rename", NO_SPACE),
        ("rename", FORBIDDEN),
        ("create", FORBIDDEN),
        ("create", NO_SPACE),
        ("mkdir", FORBIDDEN),
        ("mkdir", NO_SPACE),
        ("pread", BROKEN),
        ("find", FORBIDDEN),
        ("truncate", NO_SPACE),
        ("write_record", NO_SPACE),
        ("read_record", BROKEN),
        ("create", READ_ONLY),
        ("pwrite", READ_ONLY),
        ("rename", READ_ONLY),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
def test_a_failed_write_leaves_nothing(tmp_path: Path, call: str, code: int, after: int) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, 1 << 20, io=io)
    tier.put(*make(1))
    header, payload = make(2)
    io.faults, io.after = {call: code}, after
    stored = False
    with nullcontext() if call in ONCE_A_PUT and after else pytest.raises(TierUnavailable, match=os.strerror(code)):
        stored = tier.put(header, payload)
    io.faults = {}
    assert [path.name for path in files(tmp_path)] == sorted(map(str, tier.keys()))
    assert tier.contains(header.key) == stored
    assert tier.stats().used_bytes == (2 if stored else 1) * OBJECT_NBYTES
    assert tier.stats().failures == (0 if stored else 1)
    tier.check_integrity()
    assert tier.put(header, payload) != stored
    assert read(tier, header.key) == payload


def test_a_writer_that_cannot_even_clean_up_gives_its_space_back(tmp_path: Path) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, 1 << 20, io=io)
    io.faults = {"pwrite": NO_SPACE, "unlink": BROKEN}
    with pytest.raises(TierUnavailable):
        tier.put(*make(1))
    assert tier.stats().used_bytes == 0
    tier.close()
    with DiskTier(tmp_path, 1 << 20):
        assert files(tmp_path) == []


@pytest.mark.parametrize("code", [BROKEN, FORBIDDEN])
def test_a_failed_read_is_a_fault_and_the_object_stays(tmp_path: Path, code: int) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, 1 << 20, io=io)
    header, payload = make(1)
    tier.put(header, payload)
    for call in ("open", "pread"):
        io.faults = {call: code}
        with pytest.raises(TierUnavailable):
            tier.get(header.key)
    io.faults = {}
    lease = tier.get(header.key)
    assert lease is not None
    with lease:
        io.faults = {"pread": code}
        for use in (lease.payload, lambda: lease.layer(1)):
            with pytest.raises(TierUnavailable):
                use()
        io.faults = {}
        assert bytes(lease.payload()) == payload
    assert tier.stats().failures == 4
    assert tier.stats().quarantined == 0


def test_eviction_that_fails_loses_nothing(tmp_path: Path) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, 2 * OBJECT_NBYTES, io=io)
    objects = [make(seed) for seed in range(3)]
    for header, payload in objects[:2]:
        tier.put(header, payload)
    io.faults = {"unlink": BROKEN}
    with pytest.raises(TierUnavailable):
        tier.put(*objects[2])
    with pytest.raises(TierUnavailable):
        tier.remove(objects[0][0].key)
    io.faults = {}
    tier.check_integrity()
    assert tier.stats().used_bytes == 2 * OBJECT_NBYTES
    assert tier.stats().evictions == 0
    assert all(read(tier, header.key) == payload for header, payload in objects[:2])
    assert tier.remove(objects[0][0].key)


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    class Dribble(FaultyIO):
        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            return super().pread(fd, into[:97], offset)

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return super().pwrite(fd, data[:101], offset)

    with DiskTier(tmp_path, 1 << 20, io=Dribble()) as tier:
        header, payload = make(1, tokens=1200)
        tier.put(header, payload)
        assert read(tier, header.key) == payload


@pytest.mark.parametrize("cached", [True, False])
def test_only_what_is_in_memory_is_read_by_two_threads_at_once(tmp_path: Path, cached: bool) -> None:
    class Watched(FaultyIO):
        def __init__(self) -> None:
            super().__init__()
            self.both = threading.Barrier(2)
            self.reading = self.most = 0
            self.offsets: list[int] = []

        def cached(self, fd: int, offset: int) -> bool:
            return cached

        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            if len(into) < 1 << 20:  # the header
                return super().pread(fd, into, offset)
            self.offsets.append(offset)
            self.reading += 1
            self.most = max(self.most, self.reading)
            if cached:
                self.both.wait(30)  # passes only if both threads read
            got = super().pread(fd, into, offset)
            self.reading -= 1
            return got

    io = Watched()
    with DiskTier(tmp_path, 1 << 26, fsync=False, io=io) as tier:
        header, payload = make(1, tokens=2500, layers=4, head_dim=128)  # 4 pieces
        tier.put(header, payload)
        assert read(tier, header.key) == payload
        assert len(io.offsets) == 4
        assert cached or (io.most == 1 and io.offsets == sorted(io.offsets))
        path = path_of(tmp_path, header)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(ObjectCorrupt, match="layer 3 fails its checksum"):
            read(tier, header.key)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_flipped_bit_of_a_file_is_ever_handed_out(tmp_path: Path, data: st.DataObject) -> None:
    header, payload = make(1)
    tier = DiskTier(tmp_path, 1 << 20, fsync=False)
    tier.remove(header.key)
    tier.put(header, payload)
    path = path_of(tmp_path, header)
    raw = bytearray(path.read_bytes())
    region = data.draw(
        st.sampled_from(
            [(0, 153), (153, 250), (250, 4096)] + [(o, o + n) for o, n in map(header.layer_range, range(3))]
        )
    )
    at = data.draw(st.integers(region[0], region[1] - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    size = header.layer_nbytes
    layerwise = data.draw(st.booleans())
    with pytest.raises(ObjectCorrupt):
        lease = tier.get(header.key)
        assert lease is not None
        with lease:
            if not layerwise:
                lease.payload()
            for layer in range(3):
                assert bytes(lease.layer(layer)) == payload[layer * size : (layer + 1) * size]
    assert tier.get(header.key) is None
    assert not path.exists()
    assert tier.stats().failures == 1
    tier.check_integrity()
    assert tier.put(header, payload)
    assert read(tier, header.key) == payload
    tier.close()


@pytest.mark.parametrize("keep", [0, 1, 23, 24, 4095, 4096, 4097, OBJECT_NBYTES - 1])
@pytest.mark.parametrize("restart", [True, False])
def test_a_truncated_file_is_a_fault_then_a_miss(tmp_path: Path, keep: int, restart: bool) -> None:
    header, payload = make(1)
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(header, payload)
    os.truncate(path_of(tmp_path, header), keep)
    if restart:
        tier.close()
        tier = DiskTier(tmp_path, 1 << 20)
    with pytest.raises(ObjectCorrupt):
        read(tier, header.key)
    assert tier.get(header.key) is None
    assert tier.stats().quarantined == 1
    tier.check_integrity()


def test_a_file_that_shrinks_under_a_lease_is_a_fault(tmp_path: Path) -> None:
    header, payload = make(1)
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    os.truncate(path_of(tmp_path, header), header.object_nbytes - 1)
    assert len(lease.layer(0)) == header.layer_nbytes
    with pytest.raises(ObjectCorrupt, match="ends after"):
        lease.layer(2)


def test_a_descriptor_that_is_being_closed_is_given_to_nobody(tmp_path: Path) -> None:
    header, payload = make(1)
    seen: list[bytes | None] = []

    class Busy(FaultyIO):
        armed = False

        def close(self, fd: int) -> None:
            super().close(fd)
            if self.armed:
                self.armed = False
                seen.append(read(tier, header.key))

    io = Busy()
    tier = DiskTier(tmp_path, 1 << 20, io=io)
    tier.put(header, payload)
    lease = tier.get(header.key)
    assert lease is not None
    io.armed = True
    lease.release()
    assert seen == [payload]
    assert tier.stats().failures == 0


def test_a_file_of_another_version_is_a_fault_then_a_miss(tmp_path: Path) -> None:
    header, payload = make(1)
    with DiskTier(tmp_path, 1 << 20) as tier:
        tier.put(header, payload)
        raw = bytearray(path_of(tmp_path, header).read_bytes())
        raw[8] += 1
        path_of(tmp_path, header).write_bytes(raw)
        newer = f"format version: {LAYOUT_VERSION + 1}; this build reads version {LAYOUT_VERSION}"
        with pytest.raises(ObjectCorrupt, match=newer):
            tier.get(header.key)
        assert tier.get(header.key) is None
        assert tier.put(header, payload)


def test_another_models_object_has_another_key_or_is_refused(tmp_path: Path) -> None:
    (one, payload), (other, _) = (
        make(1),
        make(1, namespace=Namespace("acme", "1f" * 16, b"a secret of this test suite")),
    )
    assert one.token_ids == other.token_ids
    assert one.key != other.key
    with DiskTier(tmp_path, 1 << 20) as tier:
        tier.put(one, payload)
        assert tier.get(other.key) is None
        path_of(tmp_path, other).parent.mkdir(exist_ok=True)
        path_of(tmp_path, one).rename(path_of(tmp_path, other))
        with pytest.raises(ObjectCorrupt, match="key"):
            tier.get(other.key)


def test_an_object_under_another_ones_name_is_a_fault(tmp_path: Path) -> None:
    (one, payload), (other, _) = make(1), make(2)
    with DiskTier(tmp_path, 1 << 20) as tier:
        tier.put(one, payload)
        path_of(tmp_path, other).parent.mkdir(exist_ok=True)
        path_of(tmp_path, one).rename(path_of(tmp_path, other))
    with DiskTier(tmp_path, 1 << 20) as tier, pytest.raises(ObjectCorrupt, match="key"):
        tier.get(other.key)


def test_the_quarantine_counts_and_goes_first(tmp_path: Path) -> None:
    objects = [make(seed) for seed in range(3)]
    tier = DiskTier(tmp_path, 2 * OBJECT_NBYTES)
    for header, payload in objects[:2]:
        tier.put(header, payload)
    path = path_of(tmp_path, objects[1][0])
    path.write_bytes(b"x" * OBJECT_NBYTES)
    with pytest.raises(ObjectCorrupt):
        tier.get(objects[1][0].key)
    assert len(files(tmp_path, "quarantine")) == tier.stats().quarantined == 1
    assert tier.stats().used_bytes == 2 * OBJECT_NBYTES
    tier.close()
    tier = DiskTier(tmp_path, 2 * OBJECT_NBYTES)
    assert tier.stats().quarantined == 1
    assert tier.put(*objects[2])
    assert files(tmp_path, "quarantine") == []
    assert tier.stats().evictions == 0
    assert read(tier, objects[0][0].key) == objects[0][1]
    tier.check_integrity()


def test_a_corrupt_object_that_cannot_be_moved_stays_a_fault(tmp_path: Path) -> None:
    io = FaultyIO()
    tier = DiskTier(tmp_path, 1 << 20, io=io)
    header, payload = make(1)
    tier.put(header, payload)
    path_of(tmp_path, header).write_bytes(b"x" * OBJECT_NBYTES)
    io.faults = {"rename": FORBIDDEN}
    for _ in range(2):
        with pytest.raises(ObjectCorrupt):
            tier.get(header.key)
    tier.check_integrity()
    io.faults = {}
    with pytest.raises(ObjectCorrupt):
        tier.get(header.key)
    assert tier.get(header.key) is None


def test_what_another_process_removed_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    for seed in range(2):
        tier.put(*make(seed))
    for header, _ in (make(0), make(1)):
        path_of(tmp_path, header).unlink()
    with pytest.raises(StoreError, match="disk says None"):
        tier.check_integrity()
    assert tier.get(make(0)[0].key) is None
    assert tier.remove(make(1)[0].key)
    tier.check_integrity()
    assert tier.stats().used_bytes == 0
    assert tier.put(*make(0))


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "store", 1 << 20)
    tier.put(*make(1))
    shutil.rmtree(tmp_path / "store" / "objects")
    assert tier.get(make(1)[0].key) is None
    assert tier.put(*make(1))
    assert read(tier, make(1)[0].key) == make(1)[1]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TierUnavailable, match="give a directory"):
            DiskTier(path, 1 << 20)


@pytest.mark.parametrize("call", ["mkdir", "create"])
def test_a_directory_without_permission(tmp_path: Path, call: str) -> None:
    io = FaultyIO()
    io.faults = {call: FORBIDDEN}
    with pytest.raises(TierUnavailable, match=r"EACCES.*give a directory"):
        DiskTier(tmp_path / "store", 1 << 20, io=io)


def test_somebody_elses_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(TierUnavailable, match="a directory of your own"):
        DiskTier(tmp_path, 1 << 20)


@pytest.mark.parametrize(
    ("mark", "message"),
    [("blend-store 2\n", "layout 2"), ("", "mark"), ("blend-store x", "mark"), ("\xff" * 99, "mark")],
)
def test_a_directory_of_another_layout(tmp_path: Path, mark: str, message: str) -> None:
    (tmp_path / "layout").write_text(mark)
    with pytest.raises(TierUnavailable, match=message):
        DiskTier(tmp_path, 1 << 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layout"]

"""Files in a store's directory that are not the store's: they are left alone."""

from __future__ import annotations

from pathlib import Path

from blend.store import DiskTier


def test_what_is_no_session_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    (directory / "sessions").symlink_to(outside)
    DiskTier(directory, 1 << 20, fsync=False).close()
    assert (outside / "mine").read_text() == "mine"


def test_a_strangers_file_among_the_sessions_is_left_alone(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1 << 20, fsync=False).close()
    (tmp_path / "sessions" / "notes.txt").write_text("mine")
    DiskTier(tmp_path, 1 << 20, fsync=False).close()
    assert (tmp_path / "sessions" / "notes.txt").read_text() == "mine"


def test_a_strangers_temporary_file_is_left_alone(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1 << 20, fsync=False).close()
    (tmp_path / "objects" / "ab").mkdir()
    (tmp_path / "objects" / "ab" / "notes.tmp").write_text("mine")
    DiskTier(tmp_path, 1 << 20, fsync=False).close()
    assert (tmp_path / "objects" / "ab" / "notes.tmp").read_text() == "mine"

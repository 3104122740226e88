from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blend.errors import TierUnavailable
from blend.store import DiskTier, load_secret


def test_a_secret_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    secret = load_secret(directory)
    assert len(secret) == 32
    assert load_secret(str(directory)) == secret
    assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert load_secret(tmp_path / "other") != secret
    with DiskTier(directory, 1 << 20):
        assert load_secret(directory) == secret


def test_racing_askers_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: load_secret(tmp_path), range(32)))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_secret_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TierUnavailable, match="32 bytes"):
        load_secret(tmp_path)
    assert path.read_bytes() == content


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    load_secret(tmp_path)
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(TierUnavailable, match="0600"):
        load_secret(tmp_path)


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierUnavailable, match="directory"):
        load_secret(tmp_path / "file")
    (tmp_path / "secret").mkdir()
    with pytest.raises(TierUnavailable, match="secret"):
        load_secret(tmp_path)

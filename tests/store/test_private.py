"""A directory that this process may not use, met as a user without privileges: one error, which says what to do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blend.config import StoreConfig
from blend.errors import TierUnavailable
from blend.store import DiskTier, open_store
from tests.store.helpers import make, read

NOBODY = 65534
ROOM = 1 << 20


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be a user without privileges, where this process has any."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of that user with a store in it, where that user can reach it."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    made = root / "store"
    made.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(made, NOBODY, NOBODY)
    with unprivileged(), DiskTier(made, ROOM, fsync=False) as disk:
        disk.put(*make(1))
    yield made
    for path in (made, *made.iterdir()):
        path.chmod(0o700)
    shutil.rmtree(root)


def refused(directory: Path) -> str:
    """What is said of it, which is the same of the tier alone and of a store with its secret."""
    with unprivileged():
        with pytest.raises(TierUnavailable) as one:
            DiskTier(directory, ROOM)
        with pytest.raises(TierUnavailable) as other:
            open_store(StoreConfig(directory=directory, disk_bytes=ROOM, host_bytes=0))
    assert str(one.value) == str(other.value)
    return str(one.value)


@pytest.mark.parametrize("mode", [0o500, 0o300, 0o600, 0])
def test_a_directory_that_cannot_be_written(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    said = refused(directory)
    directory.chmod(0o700)
    assert said.startswith(f"{directory}: this process may not read and write there; allow it (chmod u+rwx")
    assert said.endswith("or give another directory")
    with unprivileged(), DiskTier(directory, ROOM) as disk:
        assert read(disk, make(1)[0].key) == make(1)[1]


@pytest.mark.parametrize(
    ("name", "mode", "allow"),
    [("ledger", 0o400, "u+rw,"), ("layout", 0o200, "u+rw,"), ("objects", 0o500, "u+rwx"), ("sessions", 0, "u+rwx")],
)
def test_a_part_of_it_that_cannot_be_written(directory: Path, name: str, mode: int, allow: str) -> None:
    (directory / name).chmod(mode)
    said = refused(directory)
    assert said.startswith(f"{directory}/{name}: this process may not")
    assert f"chmod {allow}" in said


def test_a_directory_that_cannot_be_made(directory: Path) -> None:
    directory.chmod(0o500)
    said = refused(directory / "below" / "store")
    assert said == f"{directory}/below/store: EACCES (Permission denied); give a directory that can be made and written"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["", "ledger", "objects"])
def test_what_belongs_to_somebody_else(directory: Path, name: str) -> None:
    os.chown(directory / name, 0, 0)
    (directory / name).chmod(0o777)
    path = str(directory / name)
    assert refused(directory) == f"{path}: belongs to user 0, this process to {NOBODY}; give a directory of your own"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone could use what is not its own")
def test_root_does_not_write_into_another_users_directory(directory: Path) -> None:
    with pytest.raises(TierUnavailable, match=f"belongs to user {NOBODY}, this process to 0"):
        DiskTier(directory, ROOM)

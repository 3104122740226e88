"""Two processes on one directory: what the other removed is a miss, never a crash and never a wrong byte."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

from blend.store import DiskTier, TieredStore
from tests.store.helpers import OBJECT_NBYTES, make, read
from tests.store.sharing_writer import work


def spent(directory: Path) -> int:
    """Return the bytes of all files of a store while nobody changes them."""
    with open(directory / "ledger", "rb") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        files = [path for folder in ("objects", "quarantine") for path in (directory / folder).rglob("*")]
        return sum(path.stat().st_size for path in files if path.is_file())


def test_two_processes_put_read_remove_and_evict_at_once(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.store.sharing_writer", str(tmp_path), "2", "600"], cwd=Path(__file__).parents[2]
    )
    hits, over = 0, []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            if (nbytes := spent(tmp_path)) > 6 * OBJECT_NBYTES:
                over.append(nbytes)

    DiskTier(tmp_path, 6 * OBJECT_NBYTES).close()
    watcher = threading.Thread(target=watch, name="budget watcher")
    watcher.start()
    try:
        while other.poll() is None:
            hits += work(str(tmp_path), seed=hits, steps=200)
    finally:
        stop.set()
        watcher.join()
        assert other.wait(timeout=60) == 0
    assert not over
    assert hits
    with DiskTier(tmp_path, 1 << 20) as tier:
        for key in list(tier.keys()):
            assert read(tier, key) is not None
        tier.check_integrity()


def test_an_object_that_the_other_store_removed_is_a_miss_and_its_leases_read_on(tmp_path: Path) -> None:
    header, payload = make(1)
    one = TieredStore([DiskTier(tmp_path, 1 << 20)])
    one.put(header, payload)
    other = TieredStore([DiskTier(tmp_path, 1 << 20)])
    lease = one.get(header.key)
    assert lease is not None
    assert other.remove(header.key)
    assert bytes(lease.payload()) == payload
    lease.release()
    found = one.lookup(header.key)
    assert (found.lease, found.reason) == (None, "")
    assert one.put(header, payload)
    assert read(one, header.key) == payload

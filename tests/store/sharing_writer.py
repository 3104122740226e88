"""Run as a script: put, read, remove and evict in a directory that another process uses too.

Usage: ``python -m tests.store.sharing_writer DIRECTORY SEED STEPS``. Ends with 0 if no byte was ever wrong.
"""

from __future__ import annotations

import random
import sys

from blend.store import DiskTier, HostTier, TieredStore
from tests.store.helpers import OBJECT_NBYTES, make

OBJECTS = [make(seed) for seed in range(12)]


def work(directory: str, seed: int, steps: int) -> int:
    """Return how many reads were hits."""
    rng, hits = random.Random(seed), 0
    disk = DiskTier(directory, 6 * OBJECT_NBYTES, fsync=False)
    with TieredStore([HostTier(2 * OBJECT_NBYTES), disk]) as store:
        for _ in range(steps):
            header, payload = rng.choice(OBJECTS)
            action = rng.random()
            if action < 0.4:
                store.put(header, payload)
            elif action < 0.6:
                store.remove(header.key)
            else:
                lease = store.get(header.key)
                if lease is not None:
                    with lease:
                        assert bytes(lease.payload()) == payload
                        hits += 1
        stats = store.stats()
        assert stats.failures == 0, stats
        assert disk.stats().used_bytes <= 6 * OBJECT_NBYTES
        disk.check_integrity()
    return hits


if __name__ == "__main__":
    sys.exit(0 if work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) else 1)

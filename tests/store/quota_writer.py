"""Run as a script: put objects of two tenants in a directory that another process uses too.

Usage: ``python -m tests.store.quota_writer DIRECTORY SEED STEPS``. Ends with 0 if no byte was ever wrong.
"""

from __future__ import annotations

import random
import sys

from blend.errors import ResourceExhausted
from blend.store import DiskTier, Namespace, Quotas, tenant_tag
from tests.store.helpers import OBJECT_NBYTES, make, read

SECRET = b"a secret of this test suite"
ONE, OTHER = (Namespace(name, "0f" * 16, SECRET) for name in ("one", "other"))
QUOTA = 3 * OBJECT_NBYTES
QUOTAS = Quotas(limits={tenant_tag(SECRET, "one"): QUOTA})
CAPACITY = 12 * OBJECT_NBYTES
OBJECTS = [make(seed, namespace=ONE) for seed in range(10)] + [make(seed, namespace=OTHER) for seed in range(6)]


def work(directory: str, seed: int, steps: int) -> int:
    """Return how many objects were put."""
    rng, puts = random.Random(seed), 0
    with DiskTier(directory, CAPACITY, fsync=False, quotas=QUOTAS) as disk:
        for _ in range(steps):
            header, payload = rng.choice(OBJECTS)
            action = rng.random()
            if action < 0.6:
                try:
                    puts += disk.put(header, payload)
                except ResourceExhausted as error:
                    if "quota" not in str(error):  # the other process is writing all that the tenant may hold
                        raise
            elif action < 0.7:
                disk.remove(header.key)
            else:
                assert read(disk, header.key) in (None, payload)
        assert disk.stats().failures == 0
        disk.check_integrity()
    return puts


if __name__ == "__main__":
    sys.exit(0 if work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) else 1)

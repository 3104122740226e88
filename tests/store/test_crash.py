"""A writer killed at any byte leaves the old objects, the new one or none of it: never half of one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blend.store import DiskTier
from tests.store.helpers import make, read

OBJECT = make(0, tokens=40)[0].object_nbytes


class Victims:
    """A process whose children write into a directory until they are killed."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.crash_writer", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def write_until(self, seed: int, deadline: int, share: float) -> bool:
        """Let a child put object ``seed``; return whether it was killed before it had."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seed} {deadline} {share}\n")
        self.process.stdin.flush()
        return {"1\n": True, "0\n": False}[self.process.stdout.readline()]


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    made = Victims(tmp_path)
    yield made
    made.process.communicate(timeout=30)


def test_kill_at_every_call_of_a_first_put(tmp_path: Path, victims: Victims) -> None:
    deadline, killed = 0, True
    while killed:
        deadline += 1
        seed = deadline
        killed = victims.write_until(seed, deadline, 0.5)
        check(tmp_path, {seed}, surely=() if killed else (seed,))
    assert deadline > 10  # directories, mark, file, three writes and more, flushes, renames


def test_kill_at_random_points_among_evictions(tmp_path: Path, victims: Victims) -> None:
    rng = random.Random(20)
    survivors = 0
    for seed in range(1, 51):
        killed = victims.write_until(seed, rng.randint(1, 32), rng.random())
        survivors += not killed
        check(tmp_path, set(range(1, seed + 1)), surely=() if killed else (seed,))
    assert 5 < survivors < 45


def check(directory: Path, seeds: set[int], surely: tuple[int, ...]) -> None:
    """Every object of ``seeds`` is there as a whole or not at all, and nothing else lies about."""
    with DiskTier(directory, 3 * OBJECT) as tier:
        by_key = {make(seed, tokens=40)[0].key: make(seed, tokens=40)[1] for seed in seeds}
        found = {key: read(tier, key) for key in tier.keys()}  # noqa: SIM118
        assert all(found[key] == by_key[key] for key in found.keys() & by_key.keys())
        assert {make(seed, tokens=40)[0].key for seed in surely} <= found.keys()
        assert tier.stats().failures == tier.stats().quarantined == 0
        assert tier.stats().used_bytes == len(found) * OBJECT  # what the dead had reserved is free again
        assert not list(directory.rglob("objects/**/*.tmp"))
        tier.check_integrity()

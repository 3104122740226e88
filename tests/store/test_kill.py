"""A process killed at any moment, not at a system call of ours: what it had acknowledged is there, nothing is half."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blend.store import DiskTier, ObjectKey
from tests.store.helpers import read
from tests.store.kill_writer import NBYTES, SEEDS_A_ROUND, objects

PLENTY = 1_000_000


class Victims:
    """A process whose children write into a directory until they are killed."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.kill_writer", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def kill_one(self, first: int, budget: int, how: str, seconds: float) -> list[tuple[str, int]]:
        """Let a child write, kill it that long after it has begun; return what it said it had done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{first} {budget} {how}\n")
        self._process.stdin.flush()
        said: list[tuple[str, int]] = []
        for line in self._process.stdout:
            word, _, rest = line.partition(" ")
            if word == "ended":
                return said
            assert word != "failed", rest
            if word == "ready":
                threading.Timer(seconds, os.kill, (int(rest), signal.SIGKILL)).start()
            else:
                said.append((word, int(rest)))
        raise AssertionError("the writer's parent is gone")

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    made = Victims(tmp_path)
    yield made
    made.close()


def seeds_on(tier: DiskTier, known: dict[ObjectKey, int]) -> set[int]:
    """Read every object; each is one that was put, byte for byte. Returns which."""
    found = set()
    for key in tier.keys():  # noqa: SIM118
        seed = known[key]
        assert read(tier, key) == objects(seed)[1]
        found.add(seed)
    assert tier.stats().failures == tier.stats().quarantined == 0
    assert tier.stats().used_bytes == len(found) * NBYTES
    tier.check_integrity()
    return found


def killed(
    tmp_path: Path, victims: Victims, rounds: int, budget: int, hows: list[str], rng: random.Random
) -> tuple[int, int]:
    """Kill writers at random moments and look; returns how many objects they acknowledged and how many died early."""
    known: dict[ObjectKey, int] = {}
    must: set[int] = set()
    must_not: set[int] = set()
    acknowledged = silent = 0
    for number in range(rounds):
        first = number * SEEDS_A_ROUND
        said = victims.kill_one(first, budget, hows[number % len(hows)], rng.uniform(0, 0.05))
        silent += not said
        acknowledged += sum(word == "stored" for word, _ in said)
        for word, seed in said:
            if word == "stored":
                must.add(seed)
            elif word == "removing":
                must.discard(seed)
            else:
                must_not.add(seed)
        for seed in range(first, max((seed for _, seed in said), default=first) + 60):
            known[objects(seed)[0].key] = seed
        files = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= budget * NBYTES
        with DiskTier(tmp_path, budget * NBYTES, fsync=False) as tier:
            assert not list((tmp_path / "objects").rglob("*.tmp"))
            found = seeds_on(tier, known)
            assert not found & must_not
            if budget == PLENTY:
                assert must <= found
            if found and number % 5 == 4:  # and so the next one starts on a directory that was used in between
                header = objects(min(found))[0]
                assert tier.remove(header.key)
                must.discard(min(found))
                must_not.add(min(found))
    return acknowledged, silent


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path, victims: Victims) -> None:
    hows = ["write_through", "put_async", "write_back"]
    acknowledged, silent = killed(tmp_path, victims, 30, PLENTY, hows, random.Random(5))
    assert acknowledged > 30
    assert silent < 30


@pytest.mark.slow
def test_nothing_is_half_where_others_are_evicted(tmp_path: Path, victims: Victims) -> None:
    acknowledged, _ = killed(tmp_path, victims, 20, 6, ["write_through", "put_async", "write_back"], random.Random(6))
    assert acknowledged > 20

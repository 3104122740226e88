"""Run as a script: for each line of its input, a child writes, flushes and removes objects until it is killed.

Usage: ``python -m tests.store.kill_writer DIRECTORY``. A line holds the first seed, the budget in objects and how to
write. The child says that it is ready, with its process id, and what it has done, the moment it is done; behind it
comes ``ended``.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import NoReturn

from blend.store import DiskTier, Header, HostTier, Policy, TieredStore
from tests.store.helpers import make

TOKENS = 400
SEEDS_A_ROUND = 10_000
NBYTES = make(0, tokens=TOKENS)[0].object_nbytes


def tell(word: str, number: int = 0) -> None:
    """One write, so that no line is ever there in part."""
    os.write(1, f"{word} {number}\n".encode())


def objects(first: int) -> tuple[Header, bytes]:
    return make(first, tokens=TOKENS)


def work(directory: str, first: int, budget: int, how: str) -> None:
    """Put objects ``first``, ``first + 1`` and so on, and remove some of them, for as long as it lives.

    ``stored`` is told when an object has to outlive the process, ``removing`` before it may be gone and ``removed``
    when it has to be.
    """
    rng = random.Random(first)
    disk = DiskTier(directory, budget * NBYTES, fsync=False)
    policy = Policy(write="write_back" if how == "write_back" else "write_through", retry_seconds=0.0)
    store = TieredStore([HostTier(4 * NBYTES), disk], policy=policy)
    mine: list[int] = []
    fresh: list[int] = []
    tell("ready", os.getpid())
    for seed in range(first, first + SEEDS_A_ROUND):
        header, payload = objects(seed)
        if how == "put_async":
            if store.put_async(header, payload).durable.result(30):
                fresh.append(seed)
        else:
            store.put(header, payload)
            fresh.append(seed)
        if how != "write_back" or rng.random() < 0.3:
            store.flush()
            for done in fresh:
                tell("stored", done)
            mine, fresh = mine + fresh, []
        if mine and rng.random() < 0.2:
            gone = mine.pop(rng.randrange(len(mine)))
            tell("removing", gone)
            store.remove(objects(gone)[0].key)
            tell("removed", gone)


def live(directory: str, first: int, budget: int, how: str) -> NoReturn:
    try:
        work(directory, first, budget, how)
    except BaseException as error:  # noqa: BLE001 - the parent's test reads it
        os.write(1, f"failed {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def main() -> None:
    directory = str(Path(sys.argv[1]))
    for line in sys.stdin:
        first, budget, how = line.split()
        child = os.fork()
        if child == 0:
            live(directory, int(first), int(budget), how)
        os.waitpid(child, 0)
        tell("ended")


if __name__ == "__main__":
    main()

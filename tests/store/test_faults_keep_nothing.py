"""A fault leaves no memory behind: the host tier's is free again at once, without the cyclic collector."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from blend.errors import ObjectCorrupt, ResourceExhausted, StoreError
from blend.store import DiskTier, Header, HostTier, TieredStore
from tests.store.helpers import OBJECT_NBYTES, FaultyIO, make, path_of


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Stack:
    def __init__(self, directory: Path) -> None:
        self.io = FaultyIO()
        self.directory = directory
        self.host = HostTier(3 * OBJECT_NBYTES)
        self.store = TieredStore([self.host, DiskTier(directory, 1 << 20, fsync=False, io=self.io)])

    def damaged(self, seed: int) -> Header:
        header, payload = make(seed)
        self.store.put(header, payload)
        path = path_of(self.directory, header)
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
        self.host.remove(header.key)
        return header


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    made.store.close()


def test_a_put_that_fails_below_the_host(stack: Stack) -> None:
    header, payload = make(1)
    stack.io.faults = {"pwrite": errno.ENOSPC}
    assert stack.store.put(header, payload)
    event = stack.store.put_async(*make(2)).durable
    with pytest.raises(StoreError):
        event.result(30)
    assert stack.store.wait_idle(30)
    for seed in (1, 2):
        stack.host.remove(make(seed)[0].key)
    assert stack.host.stats().used_bytes == 0


def test_reading_bytes_that_are_wrong(stack: Stack) -> None:
    lease = stack.store.get(stack.damaged(1).key)
    assert lease is not None
    with lease, pytest.raises(ObjectCorrupt):
        lease.payload()
    del lease
    assert stack.host.stats().used_bytes == 0


def test_loading_bytes_that_are_wrong(stack: Stack) -> None:
    header = stack.damaged(2)
    loads = stack.store.load([header.key])
    with loads, pytest.raises(ObjectCorrupt):
        loads[header.key].payload()
    assert stack.store.wait_idle(30)
    assert stack.host.stats().used_bytes == 0


def test_a_put_that_finds_no_room(stack: Stack) -> None:
    leases = []
    stack.io.faults = {"pwrite": errno.ENOSPC}
    for seed in range(3):
        stack.store.put(*make(seed))
        leases.append(stack.host.get(make(seed)[0].key))
    with pytest.raises((StoreError, ResourceExhausted)):
        stack.store.put(*make(9))
    for lease in leases:
        assert lease is not None
        lease.release()
    del leases, lease
    for seed in range(3):
        stack.host.remove(make(seed)[0].key)
    assert stack.host.stats().used_bytes == 0

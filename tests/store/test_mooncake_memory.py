"""Objects between the host tier's memory and a real Mooncake store: moved without a copy where that is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from blend.config import StoreConfig
from blend.errors import InvalidInput, TierUnavailable
from blend.store import HostTier, TieredStore, encode, mooncake, open_store
from blend.store.mooncake import MooncakeTier
from tests.store.helpers import make, read
from tests.store.mooncake_server import Master, cluster, config_for, require_mooncake, wait_for

__all__ = ["cluster"]
_prefixes = count()
_BIG = 1 << 20
Store = tuple[TieredStore, HostTier, MooncakeTier]


class Spy:
    """A client of the library that takes down which memory it moves, and refuses some registrations."""

    make: Callable[[], Any]
    refuses: int
    """Registrations of at least so many bytes are refused; 0 refuses none."""
    moved: list[tuple[str, int, int]]

    def __init__(self) -> None:
        self._client: Any = Spy.make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register_buffer(self, address: int, nbytes: int) -> int:
        if Spy.refuses and nbytes >= Spy.refuses:
            return -600
        return int(self._client.register_buffer(address, nbytes))

    def batch_put_from_multi_buffer_ranges(self, names: Any, pointers: Any, sizes: Any, offsets: Any) -> Any:
        Spy._note("put", pointers, sizes)
        return self._client.batch_put_from_multi_buffer_ranges(names, pointers, sizes, offsets)

    def batch_get_into_multi_buffer_ranges(self, names: Any, pointers: Any, sizes: Any, offsets: Any) -> Any:
        Spy._note("get", pointers, sizes)
        return self._client.batch_get_into_multi_buffer_ranges(names, pointers, sizes, offsets)

    @staticmethod
    def _note(kind: str, pointers: Any, sizes: Any) -> None:
        for one, other in zip(pointers, sizes, strict=True):
            Spy.moved += [(kind, int(pointer), int(size)) for pointer, size in zip(one, other, strict=True)]


@pytest.fixture
def spied(cluster: Master, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Store]]:
    """Return an opener of stores with a host tier above the real Mooncake, watched."""
    require_mooncake()
    monkeypatch.setattr(Spy, "make", staticmethod(mooncake.library()), raising=False)
    monkeypatch.setattr(Spy, "moved", [], raising=False)
    monkeypatch.setattr(Spy, "refuses", 0, raising=False)
    monkeypatch.setattr(mooncake, "library", lambda: Spy)
    opened: list[TieredStore] = []

    def opener(prefix: str | None = None, **settings: object) -> Store:
        config = config_for(cluster, prefix=prefix or f"memory{next(_prefixes)}", **settings)
        store, _ = open_store(StoreConfig(host_bytes=16 << 20, disk_bytes=0, mooncake=config))
        opened.append(store)
        host, shared = store.tiers
        assert isinstance(host, HostTier)
        assert isinstance(shared, MooncakeTier)
        return store, host, shared

    yield opener
    for store in opened:
        store.close()


def big(seed: int) -> tuple[Any, bytes]:
    header, payload = make(seed, tokens=256, head_dim=128, layers=4)
    assert header.layer_nbytes >= _BIG // 8
    return header, payload


def in_arena(host: HostTier, kind: str) -> list[bool]:
    """Whether each payload that was moved was in the host tier's memory; headers are too small to count."""
    memory = np.frombuffer(host.memory, np.uint8)
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    return [
        begin <= pointer and pointer + size <= end
        for found, pointer, size in Spy.moved
        if found == kind and size > 8192
    ]


def test_puts_and_gets_use_the_host_tiers_memory(spied: Callable[..., Store]) -> None:
    store, host, _ = spied("straight")
    header, payload = big(1)
    stored = store.put_async(header, payload)
    assert stored.durable.result(30)
    assert in_arena(host, "put") == [True]
    other, others_host, others_mooncake = spied("straight")
    assert read(other, header.key) == payload
    found = in_arena(others_host, "get")
    assert found
    assert all(found)
    assert other.lookup(header.key).tier == "host"
    wait_for("staging to be free", lambda: others_mooncake.status().staging_used_bytes == 0)
    for each in (store, other):
        each.check_integrity()


def test_a_put_to_both_sends_the_host_tiers_copy(spied: Callable[..., Store]) -> None:
    store, host, shared = spied()
    header, payload = big(6)
    mutable = bytearray(payload)
    assert store.put(header, mutable)
    mutable[:] = bytes(len(mutable))
    assert in_arena(host, "put") == [True]
    assert read(store, header.key) == read(shared, header.key) == payload


def test_loading_by_layers_uses_it_too(spied: Callable[..., Store]) -> None:
    store, _, shared = spied("layers")
    objects = [big(seed) for seed in range(3)]
    for header, payload in objects:
        shared.put(header, payload)
    other, host, _ = spied("layers")
    with other.load([header.key for header, _ in objects]) as loads:
        for header, payload in objects:
            assert bytes(loads[header.key].payload()) == payload
    found = in_arena(host, "get")
    assert len(found) >= 3 * 3  # of four layers the last two come together
    assert all(found)
    store.check_integrity()


@pytest.mark.parametrize("joined", [False, True])
def test_memory_that_is_refused_costs_a_copy(
    spied: Callable[..., Store], cluster: Master, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spy, "refuses", 12 << 20)
    name = f"refused{joined}"
    store, host, shared = spied(name, connect_seconds=30.0 if joined else 0.0)
    wait_for("joining", lambda: shared.status().up)
    header, payload = big(2)
    store.put_async(header, payload).durable.result(30)
    assert in_arena(host, "put") == [False]
    other, others_host, _ = spied(name)
    assert read(other, header.key) == payload
    assert not any(in_arena(others_host, "get"))
    if joined:
        with pytest.raises(TierUnavailable, match="registers no"):
            shared.register(host.memory)
    with pytest.raises(InvalidInput, match="registered"):
        shared.unregister(host.memory)


def test_registered_memory_is_kept_for_as_long_as_the_store_may_use_it(spied: Callable[..., Store]) -> None:
    store, _, shared = spied()
    header, payload = big(3)
    store.put_async(header, payload).durable.result(30)
    lease = shared.get(header.key)
    assert lease is not None
    store.close()
    assert shared._client.link._registered
    assert bytes(lease.payload()) == payload
    del lease
    wait_for("leaving", lambda: not shared._client.link._registered)


def test_what_is_written_in_any_pieces_arrives_whole(spied: Callable[..., Store]) -> None:
    _, host, shared = spied()
    source, data = big(4)
    host.put(source, data)
    lease = host.get(source.key)
    assert lease is not None
    whole = encode(source) + data
    cuts = {
        "as layers": [0, source.header_nbytes, *(source.layer_range(layer)[0] for layer in range(1, 4))],
        "in a header of two": [0, 100],
        "in odd ones": [0, 8191, 70_001, 70_002],
    }
    for pieces in cuts.values():
        shared.remove(source.key)
        with shared.start(source.key, source.object_nbytes) as writer:
            for begin, end in reversed(list(zip(pieces, [*pieces[1:], len(whole)], strict=True))):
                writer.write(begin, whole[begin:end])
            assert writer.commit()
        assert read(shared, source.key) == data
    shared.remove(source.key)
    with shared.start(source.key, source.object_nbytes) as writer:
        writer.write(0, bytes(len(whole)))
        writer.write(source.header_nbytes, lease.payload())
        writer.write(0, encode(source))
        writer.write(50, b"")
        assert writer.commit()
    assert read(shared, source.key) == data


def test_memory_that_may_change_is_copied(spied: Callable[..., Store]) -> None:
    _, _, shared = spied()
    header, payload = big(5)
    memory = np.frombuffer(bytearray(payload), np.uint8)
    shared.register(memory)
    with shared.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        writer.write(header.header_nbytes, memory)
        memory[:] = 0
        assert writer.commit()
    assert read(shared, header.key) == payload
    memory[:] = np.frombuffer(payload, np.uint8)
    shared.remove(header.key)
    Spy.moved.clear()
    assert shared.put(header, memory)
    assert memory.ctypes.data in {pointer for _, pointer, _ in Spy.moved}
    shared.unregister(memory)

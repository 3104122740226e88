"""Wrong bytes from a tier, one flipped bit at a time in every region of an object: never handed out, never promoted."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blend.errors import ObjectCorrupt, StoreError
from blend.store import DiskTier, Header, HostTier, Tier, TieredStore, encode
from blend.store.mooncake import MooncakeTier, library
from tests.store.helpers import OBJECT_NBYTES, FaultyIO, make, path_of, read
from tests.store.mooncake_server import Master, cluster, config_for

__all__ = ["cluster"]

HEADER, PAYLOAD = make(1, neighbours=["5" * 40, "6" * 40], sensitive=True)
TOKENS_END = 153 + 4 * HEADER.tokens
CHECKSUMS_END = TOKENS_END + 40 + 8 * HEADER.layers
FIELDS = {
    "magic": (0, 8),
    "format version": (8, 12),
    "header length": (12, 16),
    "header checksum": (16, 24),
    "namespace": (24, 56),
    "generation": (56, 72),
    "key": (72, 92),
    "variant": (92, 101),
    "dtype": (101, 117),
    "shape": (117, 141),
    "payload length": (141, 149),
    "sensitivity length": (149, 153),
    "token ids": (153, TOKENS_END),
    "neighbours": (TOKENS_END, TOKENS_END + 40),
    "layers' checksums": (TOKENS_END + 40, CHECKSUMS_END),
    "sensitivity": (CHECKSUMS_END, CHECKSUMS_END + 2 * HEADER.layers * HEADER.tokens),
}
PADDING = (max(end for _, end in FIELDS.values()), HEADER.header_nbytes)
LAYERS = {
    f"layer {layer}": (start, start + nbytes)
    for layer in range(HEADER.layers)
    for start, nbytes in [HEADER.layer_range(layer)]
}


def test_the_regions_cover_an_object() -> None:
    spans = [*FIELDS.values(), PADDING, *LAYERS.values()]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == HEADER.object_nbytes
    assert encode(HEADER)[slice(*FIELDS["token ids"])] == b"".join(t.to_bytes(4, "little") for t in HEADER.token_ids)
    assert encode(HEADER)[slice(*FIELDS["sensitivity"])] == HEADER.sensitivity != b""


def whole(tier: Tier, header: Header) -> bytes | None:
    return read(tier, header.key)


def by_layers(tier: Tier, header: Header) -> bytes | None:
    lease = tier.get(header.key)
    if lease is None:
        return None
    with lease:
        return b"".join(bytes(lease.layer(layer)) for layer in range(header.layers))


def into_memory(tier: Tier, header: Header) -> bytes | None:
    lease = tier.get(header.key)
    if lease is None:
        return None
    room = bytearray(header.payload_nbytes)
    with lease:
        lease.payload(into=memoryview(room))
    return bytes(room)


def loaded(tier: Tier, header: Header) -> bytes | None:
    assert isinstance(tier, TieredStore)
    with tier.load([header.key]) as loads:
        if header.key not in loads:
            if loads.missed[header.key]:
                raise StoreError(loads.missed[header.key])
            return None
        return bytes(loads[header.key].payload())


Reader = Callable[[Tier, Header], "bytes | None"]
READERS: list[Reader] = [whole, by_layers, into_memory, loaded]


@pytest.mark.parametrize("region", [*FIELDS, "padding", *LAYERS])
def test_every_byte_of_a_file(tmp_path: Path, region: str) -> None:
    """All bytes of a region but of the padding, of which every 97th."""
    rng = random.Random(region)
    host = HostTier(20 * OBJECT_NBYTES)
    disk = DiskTier(tmp_path, 4 * OBJECT_NBYTES, fsync=False)
    path = path_of(tmp_path, HEADER)
    right = encode(HEADER) + PAYLOAD
    places = range(*PADDING, 97) if region == "padding" else range(*{**FIELDS, **LAYERS}[region])
    with TieredStore([host, disk]) as store:
        store.put(HEADER, PAYLOAD)
        host.remove(HEADER.key)
        for number, at in enumerate(places):
            wrong = bytearray(right)
            wrong[at] ^= 1 << rng.randrange(8)
            path.write_bytes(wrong)
            reader = READERS[number % len(READERS)]
            with pytest.raises(StoreError):
                reader(store, HEADER)
            assert store.wait_idle(30)
            assert not host.contains(HEADER.key)
            assert reader(store, HEADER) is None  # out of the way, so that the next request computes it
            assert not path.exists()
            assert disk.put(HEADER, PAYLOAD)
        assert disk.stats().failures == len(places)
        assert disk.stats().used_bytes <= disk.stats().capacity_bytes
        store.check_integrity()
        assert loaded(store, HEADER) == PAYLOAD


def test_wrong_bytes_that_come_once_are_right_again_afterwards(tmp_path: Path) -> None:
    """A bit that flips on the way, not on the disk: the read fails, and no other object is blamed."""

    class Flipping(FaultyIO):
        at: int | None = None

        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            got = super().pread(fd, into, offset)
            if self.at is not None and offset <= self.at < offset + got:
                into[self.at - offset] ^= 1
                self.at = None
            return got

    io = Flipping()
    disk = DiskTier(tmp_path, 1 << 20, fsync=False, io=io)
    other, data = make(2)
    for at in range(0, HEADER.object_nbytes, 51):
        disk.put(HEADER, PAYLOAD)
        disk.put(other, data)
        io.at = at
        with pytest.raises(ObjectCorrupt):
            read(disk, HEADER.key)
        assert read(disk, other.key) == data
    assert disk.put(HEADER, PAYLOAD)
    assert read(disk, HEADER.key) == PAYLOAD
    disk.check_integrity()


class Liar:
    """The library's client; of the next object that is read, one bit comes out wrong."""

    def __init__(self, lie: dict[str, int]) -> None:
        self._inner = library()()
        self._lie = lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def batch_get_into_multi_buffer_ranges(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        codes: list[int] = list(self._inner.batch_get_into_multi_buffer_ranges(names, pointers, sizes, offsets))
        at = self._lie.get("at")
        for group in zip(pointers, sizes, offsets, strict=True):
            for pointer, size, offset in zip(*group, strict=True):
                if at is not None and offset <= at < offset + size:
                    ctypes.c_ubyte.from_address(pointer + at - offset).value ^= 4
                    self._lie["told"] = self._lie.get("told", 0) + 1
        return codes


@pytest.fixture
def lie() -> dict[str, int]:
    return {}


@pytest.fixture
def liar(cluster: Master, lie: dict[str, int]) -> Iterator[MooncakeTier]:
    with MooncakeTier(config_for(cluster, prefix="liar"), lambda: Liar(lie)) as tier:
        yield tier


def test_every_region_that_mooncake_returns(liar: MooncakeTier, lie: dict[str, int]) -> None:
    """Header fields, token ids and each layer, first and last byte of each, whole and by layers, alone and loaded."""
    host = HostTier(20 * OBJECT_NBYTES)
    store = TieredStore([host, liar])
    told = 0
    for start, end in [*FIELDS.values(), PADDING, *LAYERS.values()]:
        for at in (start, end - 1):
            for reader in READERS:
                store.put(HEADER, PAYLOAD)
                host.remove(HEADER.key)
                lie["at"] = at
                with pytest.raises(StoreError):
                    reader(store, HEADER)
                assert store.wait_idle(30)
                told, before = lie["told"], told
                assert told > before, "the lie was told"
                del lie["at"]
                assert not host.contains(HEADER.key)
                assert reader(store, HEADER) in (None, PAYLOAD)
                host.remove(HEADER.key)
    store.put(HEADER, PAYLOAD)
    assert read(store, HEADER.key) == PAYLOAD
    store.check_integrity()
    store.close()


def test_one_wrong_layer_from_mooncake_costs_no_other_object(liar: MooncakeTier, lie: dict[str, int]) -> None:
    store = TieredStore([HostTier(20 * OBJECT_NBYTES), liar])
    others = [make(seed) for seed in range(20, 24)]
    for header, payload in [(HEADER, PAYLOAD), *others]:
        store.put(header, payload)
        store.tiers[0].remove(header.key)
    lie["at"] = HEADER.layer_range(1)[0]  # of whatever is read: all of the objects have their layer 1 there
    with store.load([HEADER.key, *(header.key for header, _ in others)]) as loads:
        assert len(loads) == 5
        for header, payload in [(HEADER, PAYLOAD), *others]:
            assert bytes(loads[header.key].layer(0)) == payload[: header.layer_nbytes]
            with pytest.raises(ObjectCorrupt, match="layer 1"):
                loads[header.key].payload()
    del lie["at"]
    for header, payload in [(HEADER, PAYLOAD), *others]:
        store.put(header, payload)
        assert read(store, header.key) == payload
    store.close()

"""The allocator against a plain list of bytes, and the host tier's memory: reused, never under a view."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import ResourceExhausted, StoreError
from blend.store import HostTier, encode
from blend.store.arena import ALIGN, Arena, Extents
from tests.store.helpers import OBJECT_NBYTES, make, read


@given(st.lists(st.one_of(st.integers(1, 400), st.integers(-30, -1)), max_size=60))
def test_extents_never_overlap_and_fit_best(steps: list[int]) -> None:
    """A positive step takes so many bytes, a negative one gives a part back."""
    extents = Extents(1000)
    owner = np.zeros(1000, np.int32)
    taken: dict[int, int] = {}
    for number, step in enumerate(steps, start=1):
        if step < 0:
            if taken:
                start = list(taken)[-step % len(taken)]
                owner[start : start + taken.pop(start)] = 0
                extents.give_back(start)
        else:
            edges = np.flatnonzero(np.diff(np.concatenate(([1], owner != 0, [1]))))
            gaps = [int(b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
            found = extents.take(step)
            assert (found is None) == (step > max(gaps, default=0))
            if found is not None:
                assert not owner[found : found + step].any()
                owner[found : found + step] = number
                taken[found] = step
                left = [int(b - a) for a, b in _gaps(owner)]
                best = min(gap for gap in gaps if gap >= step)
                assert sorted([*left, best]) == sorted(gaps + ([best - step] if best > step else []))
        extents.check()
        assert extents.free == int((owner == 0).sum())
    for start in taken:
        extents.give_back(start)
    extents.check()
    assert extents.take(1000) == 0


def _gaps(owner: np.ndarray) -> list[tuple[int, int]]:  # type: ignore[type-arg]
    edges = np.flatnonzero(np.diff(np.concatenate(([1], owner != 0, [1]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_blocks_are_aligned_whatever_memory_there_is() -> None:
    arena = Arena(10_000, allocate=lambda nbytes: memoryview(bytearray(nbytes + 3))[3:])
    blocks = [arena.take(nbytes) for nbytes in (1, 63, 64, 65, 1000)]
    for block in blocks:
        assert block is not None
        assert np.frombuffer(block.view(), np.uint8).ctypes.data % ALIGN == 0
    arena.check()


def test_a_block_is_in_use_while_any_view_lives() -> None:
    arena = Arena(1000)
    block = arena.take(100)
    assert block is not None
    assert not block.in_use
    derived = np.frombuffer(block.view()[10:90], np.uint16)[::3].reshape(-1, 2).T
    assert block.in_use
    assert block.view()[10] == derived[0, 0] & 0xFF
    del derived
    assert not block.in_use
    arena.give_back(block)
    arena.check()


def test_integrity_covers_the_allocator() -> None:
    tier = HostTier(1 << 20)
    tier.put(*make(1))
    tier.check_integrity()
    tier._arena._extents.free += 1
    with pytest.raises(StoreError, match="arena"):
        tier.check_integrity()
    tier = HostTier(1 << 20)
    assert tier._arena.take(100)
    with pytest.raises(StoreError, match="1 blocks are taken, 0 are known"):
        tier.check_integrity()


def test_memory_comes_from_the_callers_allocator_once() -> None:
    given_out: list[bytearray] = []

    def allocate(nbytes: int) -> bytearray:
        given_out.append(bytearray(nbytes))
        return given_out[-1]

    tier = HostTier(4 * OBJECT_NBYTES, allocate=allocate)
    for seed in range(9):
        tier.put(*make(seed))
    assert len(given_out) == 1
    memory = np.frombuffer(given_out[0], np.uint8)
    lease = tier.get(make(8)[0].key)
    assert lease is not None
    assert np.shares_memory(memory, np.frombuffer(lease.payload(), np.uint8))


def test_objects_go_until_one_piece_is_large_enough() -> None:
    tier = HostTier(8 * OBJECT_NBYTES)
    for seed in range(8):
        tier.put(*make(seed))
    for seed in (0, 2, 5):  # three holes, no two beside each other
        tier.remove(make(seed)[0].key)
    big, payload = make(100, tokens=5 + 2 * OBJECT_NBYTES // 96)
    assert big.object_nbytes < 3 * OBJECT_NBYTES
    assert tier.put(big, payload)
    assert read(tier, big.key) == payload
    assert tier.stats().evictions > 0
    tier.check_integrity()


def test_pieces_between_leases_are_no_room() -> None:
    tier = HostTier(8 * OBJECT_NBYTES)
    for seed in range(8):
        tier.put(*make(seed))
    leases = [tier.get(make(seed)[0].key) for seed in (1, 3, 5, 7)]
    before = set(tier.keys())
    with pytest.raises(ResourceExhausted, match="in one piece"):
        tier.start(make(100)[0].key, 2 * OBJECT_NBYTES + 100)
    gone = before - set(tier.keys())
    assert gone.isdisjoint(make(seed)[0].key for seed in (1, 3, 5, 7))
    tier.check_integrity()
    for lease in leases:
        assert lease is not None
        lease.release()
    tier.start(make(100)[0].key, 3 * OBJECT_NBYTES + 100).revoke()
    tier.check_integrity()


def test_a_view_that_a_source_kept_is_never_written_under() -> None:
    tier = HostTier(2 * OBJECT_NBYTES)
    header, payload = make(1)
    kept: list[memoryview] = []

    def source(into: memoryview) -> None:
        into[:] = payload
        kept.append(into)

    with tier.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        writer.fill(header.header_nbytes, header.payload_nbytes, source)
    assert tier.stats().used_bytes == OBJECT_NBYTES
    assert tier.put(*make(2))
    with pytest.raises(ResourceExhausted), tier.get(make(2)[0].key):  # type: ignore[union-attr]
        tier.put(*make(3))
    assert bytes(kept[0]) == payload
    tier.check_integrity()
    kept.clear()
    assert tier.stats().used_bytes == OBJECT_NBYTES
    tier.check_integrity()


def test_peeking_shows_what_was_written_and_keeps_it() -> None:
    tier = HostTier(2 * OBJECT_NBYTES)
    header, payload = make(1)
    with tier.start(header.key, header.object_nbytes) as writer:
        writer.write(0, encode(header))
        writer.write(header.header_nbytes, payload)
        view = writer.peek(*header.layer_range(1))
        assert view is not None
        assert view.readonly
        assert writer.commit()
    tier.remove(header.key)
    for seed in range(2, 9):
        try:
            tier.put(*make(seed))
        except ResourceExhausted:
            continue
    assert bytes(view) == payload[header.layer_nbytes : 2 * header.layer_nbytes]
    tier.check_integrity()


def test_objects_of_many_sizes_come_and_go() -> None:
    rng = random.Random(7)
    objects = [
        make(seed, tokens=rng.choice((1, 5, 40, 333, 1200)), head_dim=rng.choice((3, 4, 8))) for seed in range(40)
    ]
    tier = HostTier(sum(header.object_nbytes for header, _ in objects) // 4)
    views: list[tuple[memoryview, bytes]] = []
    for _ in range(1500):
        header, payload = rng.choice(objects)
        action = rng.random()
        try:
            if action < 0.5:
                tier.put(header, payload)
            elif action < 0.6:
                tier.remove(header.key)
            elif (lease := tier.get(header.key)) is not None:
                with lease:
                    views.append((lease.payload(), payload))
        except ResourceExhausted:
            assert views
        if len(views) > 4:
            view, expected = views.pop(rng.randrange(5))
            assert bytes(view) == expected
            del view
        if rng.random() < 0.05:
            tier.check_integrity()
        assert tier.stats().used_bytes <= tier.stats().capacity_bytes
    views.clear()
    gc.collect()
    for key in list(tier.keys()):
        tier.remove(key)
    tier.check_integrity()
    assert tier.stats().used_bytes == 0
    assert tier._arena.blocks == 0

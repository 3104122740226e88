"""The arena that transfers go through."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend.errors import InvalidInput, ResourceExhausted, TierUnavailable
from blend.store.staging import Staging


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=60))
@settings(max_examples=100)
def test_pieces_are_apart_and_come_back(actions: list[tuple[bool, int]]) -> None:
    staging = Staging("arena", 64 << 10)
    held: list[tuple[memoryview, int]] = []
    for number, (take, size) in enumerate(actions):
        if not take and held:
            held.pop(size % len(held))
            continue
        try:
            piece = staging.take(size, 0.0)
        except TierUnavailable:
            continue
        piece[:] = bytes([number % 251]) * size
        held.append((piece, number % 251))
        del piece
        assert sum(len(view) for view, _ in held) <= staging.used <= staging.capacity
        staging.check()
    for view, fill in held:
        assert bytes(view) == bytes([fill]) * len(view)
    if held:
        del view
    held.clear()
    assert staging.used == 0
    whole = staging.take(staging.capacity, 0.0)
    assert len(whole) == staging.capacity


def test_a_piece_is_held_by_whatever_was_made_of_it() -> None:
    staging = Staging("arena", 4096)
    array = np.frombuffer(staging.take(4096, 0.0)[10:20], np.uint8)
    with pytest.raises(TierUnavailable, match="4096 of 4096 bytes"):
        staging.take(1, 0.05)
    del array
    assert len(staging.take(4096, 0.0)) == 4096


def test_it_waits_for_others_to_give_back() -> None:
    staging = Staging("arena", 4096)
    pieces = [staging.take(4096, 0.0)]
    timer = threading.Timer(0.1, pieces.clear)
    timer.start()
    assert len(staging.take(100, 20.0)) == 100
    timer.join()


def test_sizes_are_checked() -> None:
    staging = Staging("arena", 5000)
    assert staging.capacity == 8192
    assert staging.address % 4096 == 0
    assert len(staging.memory) == 8192
    with pytest.raises(ResourceExhausted, match="larger"):
        staging.take(8193, 0.0)
    with pytest.raises(InvalidInput, match="nbytes"):
        staging.take(0, 0.0)

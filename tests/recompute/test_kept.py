"""Memory that canvases leave behind."""

from __future__ import annotations

import threading

import pytest
import torch

from blend.recompute.canvas import Canvas
from blend.recompute.kept import KeptMemory

MIB = 2**20


@pytest.fixture
def kept() -> KeptMemory:
    return KeptMemory(16 * MIB)


def test_memory_comes_back_and_is_zeros_again(kept: KeptMemory) -> None:
    first = kept.zeros(4 * MIB)
    address = first.data_ptr()
    assert address % 64 == 0 and not first.any()
    first.fill_(7)
    assert kept.nbytes == 0
    del first
    assert kept.nbytes >= 4 * MIB
    again = kept.zeros(3 * MIB)
    assert again.data_ptr() == address and len(again) == 3 * MIB and not again.any()
    assert kept.nbytes == 0


def test_a_view_keeps_its_memory(kept: KeptMemory) -> None:
    memory = kept.zeros(4 * MIB)
    view = memory.view(torch.float32)[5:9]
    view.fill_(3.0)
    array = view.numpy()
    del memory, view
    other = kept.zeros(4 * MIB)
    assert kept.nbytes == 0 and not other.any()
    assert array.tolist() == [3.0] * 4
    del array
    assert kept.nbytes >= 4 * MIB


def test_the_smallest_that_is_large_enough_is_taken(kept: KeptMemory) -> None:
    held = [kept.zeros(size * MIB) for size in (6, 2, 4)]
    addresses = [memory.data_ptr() for memory in held]
    held.clear()
    taken = [kept.zeros(size * MIB) for size in (3, 5, 1)]
    assert [memory.data_ptr() for memory in taken] == [addresses[2], addresses[0], addresses[1]]


def test_the_largest_stay_within_the_limit(kept: KeptMemory) -> None:
    held = [kept.zeros(size * MIB) for size in (3, 9, 5, 40)]
    largest = held[1].data_ptr()
    while held:
        held.pop()
        assert kept.nbytes <= 16 * MIB
    again = kept.zeros(9 * MIB)
    assert again.data_ptr() == largest
    assert 5 * MIB <= kept.nbytes < 9 * MIB


def test_what_is_released_is_gone(kept: KeptMemory) -> None:
    memory = kept.zeros(4 * MIB)
    del memory
    kept.release()
    assert kept.nbytes == 0


def test_what_is_small_is_not_kept(kept: KeptMemory) -> None:
    memory = kept.zeros(100)
    assert memory.data_ptr() % 64 == 0
    del memory
    assert kept.nbytes == 0


def test_threads_never_share_memory(kept: KeptMemory) -> None:
    def use(number: int) -> None:
        for _ in range(200):
            memory = kept.zeros(MIB)
            assert not memory.any()
            memory.fill_(number)
            assert memory.eq(number).all()
            done.append(number)

    done: list[int] = []
    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 800
    assert kept.nbytes <= 16 * MIB


def test_a_canvas_starts_as_zeros_where_another_one_was() -> None:
    sizes = (2, 2, 1024, 128, torch.float32, torch.device("cpu"))
    gone = Canvas(*sizes)
    gone.k.fill_(1.0)
    gone.v.fill_(2.0)
    addresses = {gone.k.data_ptr(), gone.v.data_ptr()}
    del gone
    canvas = Canvas(*sizes)
    assert {canvas.k.data_ptr(), canvas.v.data_ptr()} == addresses
    assert not canvas.k.any() and not canvas.v.any()

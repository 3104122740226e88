"""Copies beside computing: right in every order that a device may take, and nothing left under way."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blend.errors import Closed, InvalidInput
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import kernels
from blend.recompute.rope import Rotation
from blend.recompute.transfer import SLOTS, Transfers
from tests.recompute.simulated import Choose, Name, SimulatedStreams, late

CPU = torch.device("cpu")
REFERENCE = kernels(CPU, "reference")
ROTATION = Rotation(1e4 ** -(torch.arange(4) / 4), "half")
ORDERS: list[Choose] = [late("copy"), late("compute"), *(random.Random(seed).choice for seed in range(3))]


def assembly_on(streams: SimulatedStreams, canvas: Canvas, pieces: list[Piece]) -> Assembly:
    """An assembly whose kernel runs when the stream that computes comes to it."""

    def assemble(*arguments: Any) -> None:
        streams.compute(partial(REFERENCE.assemble, *arguments))

    version = replace(REFERENCE, assemble=assemble)
    return Assembly(canvas, pieces, [ROTATION] * canvas.layers, version, streams=streams)


def pieces_of(sizes: list[int], first: int = 0) -> list[Piece]:
    return [Piece(sum(sizes[:number]), size, 50, first) for number, size in enumerate(sizes)]


def filled(sizes: list[int], chunks: list[Tensor], first: int = 0) -> Canvas:
    """A canvas that is filled at once."""
    canvas = Canvas(len(chunks[0]), 2, sum(sizes), 8, torch.float32, CPU)
    assembly = Assembly(canvas, pieces_of(sizes, first), [ROTATION] * canvas.layers, REFERENCE)
    for layer in range(canvas.layers):
        assembly.put(layer, [chunk[layer] for chunk in chunks])
    return canvas


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    pinned=st.lists(st.booleans(), min_size=7, max_size=7),
    longer=st.integers(0, 2),
    first=st.integers(0, 2),
    early=st.lists(st.booleans(), min_size=6, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_a_canvas_holds_the_same_whatever_the_device_does_first(
    sizes: list[int], pinned: list[bool], longer: int, first: int, early: list[bool], seed: int
) -> None:
    layers, generator = len(early), torch.Generator().manual_seed(seed)
    chunks = [torch.randn(layers, 2, 2, first + size + longer, 8, generator=generator) for size in sizes]
    want = filled(sizes, chunks, first)
    for order in (late("copy"), late("compute"), random.Random(seed).choice):
        memory = [chunk.clone() for chunk in chunks]
        by_itself = {chunk.data_ptr() for chunk, its in zip(memory, pinned, strict=False) if its}
        streams = SimulatedStreams(order, lambda t, known=by_itself: t.untyped_storage().data_ptr() in known)
        canvas = Canvas(layers, 2, sum(sizes), 8, torch.float32, CPU)
        assembly = assembly_on(streams, canvas, pieces_of(sizes, first))
        for layer in range(layers):
            assembly.put(layer, [chunk[layer] for chunk in memory])
            if early[layer] and layer + 1 < layers:
                assembly.ahead(layer + 1, [chunk[layer + 1] for chunk in memory])
        assembly.close()
        for chunk in memory:
            chunk.fill_(torch.nan)  # nobody reads it any more
        streams.run()
        assert torch.equal(canvas.k, want.k)
        assert torch.equal(canvas.v, want.v)
        assert streams.copies == layers * len(sizes)
        assert len(streams.buffers) <= 4


def test_the_next_layer_is_copied_while_one_is_placed() -> None:
    chunks = [torch.randn(3, 2, 2, size, 8) for size in (3, 4)]
    streams = SimulatedStreams(late("copy"))
    canvas = Canvas(3, 2, 7, 8, torch.float32, CPU)
    assembly = assembly_on(streams, canvas, pieces_of([3, 4]))
    streams.run()
    assembly.put(0, [chunk[0] for chunk in chunks])
    assembly.ahead(1, [chunk[1] for chunk in chunks])
    streams.run("copy")  # the device has computed nothing yet
    assert (streams.copies, streams.copies_left) == (4, 0)
    assembly.put(1, [chunk[1] for chunk in chunks])
    assembly.ahead(2, [chunk[2] for chunk in chunks])
    streams.run("copy")
    assert streams.copies_left == 2, "the memory of layer 0 is read until that is placed"
    streams.run("compute")
    streams.run("copy")
    assert streams.copies_left == 0
    assert streams.waits == 0, "the host has waited for nothing"
    assembly.close()


def test_memory_of_the_device_is_left_to_what_had_it_before() -> None:
    streams = SimulatedStreams(late("compute"))
    finished: list[int] = []
    streams.compute(lambda: finished.append(streams.copies_left))
    transfers = Transfers([(0, 2)], torch.empty(1, 1, 2, 4), streams)
    transfers.start(0, [torch.ones(2, 1, 2, 4)])
    transfers.close()
    assert finished == [1]


def transfers_of(streams: SimulatedStreams, *sizes: int) -> tuple[Transfers, Callable[[int], list[Tensor]]]:
    """Transfers of chunks of these sizes, and what gives one layer of them, filled with its number."""
    transfers = Transfers([(0, size) for size in sizes], torch.empty(1, 1, sum(sizes), 4), streams)
    return transfers, lambda layer: [torch.full((2, 1, size, 4), float(layer)) for size in sizes]


@pytest.mark.parametrize("order", ORDERS)
def test_a_staging_buffer_is_used_again_when_the_device_has_read_it(order: Choose) -> None:
    streams = SimulatedStreams(order, lambda _: False)
    transfers, layer_of = transfers_of(streams, *[1] * 11)
    seen: list[list[float]] = []
    for layer in range(3):
        with transfers.layer(layer, layer_of(layer)) as slot:
            streams.compute(lambda slot=slot: seen.append([float(t[slot].mean()) for t in transfers.targets]))
    transfers.close()
    streams.run()
    assert seen == [[float(layer)] * 11 for layer in range(3)]
    assert len(streams.buffers) == 4
    assert {buffer.nbytes for buffer in streams.buffers} == {2 * 4 * 4}


def test_a_device_that_keeps_up_needs_one_staging_buffer() -> None:
    streams = SimulatedStreams(late("compute"), lambda _: False)
    transfers, layer_of = transfers_of(streams, 3)
    for layer in range(6):
        with transfers.layer(layer, layer_of(layer)):
            pass
        streams.run()
    assert len(streams.buffers) == 1
    assert streams.waits == 0


def test_what_is_copied_from_is_held_until_it_is_copied() -> None:
    streams = SimulatedStreams(late("copy"))
    transfers, layer_of = transfers_of(streams, 3)
    sources = layer_of(0)
    held = weakref.ref(sources[0])
    with transfers.layer(0, sources):
        del sources
    gc.collect()
    assert held() is not None
    streams.run()
    transfers.start(1, layer_of(1))
    gc.collect()
    assert held() is None, "and no longer"
    transfers.close()


def test_a_copy_that_cannot_be_issued_leaves_nothing_behind() -> None:
    class Failing(SimulatedStreams):
        def copy(self, target: Tensor, source: Tensor) -> None:
            if self.copies == 2:
                self.copies = -100
                raise RuntimeError("out of memory")
            super().copy(target, source)

    streams = Failing(late("copy"), lambda tensor: bool(tensor[0, 0, 0, 0] > 0))  # the first layer is staged
    transfers, layer_of = transfers_of(streams, 1, 2, 3)
    with pytest.raises(RuntimeError, match="out of memory"):
        transfers.start(0, layer_of(0))
    assert streams.copies_left == 2
    transfers.start(0, layer_of(7))  # tried again
    with transfers.layer(0, layer_of(7)) as slot:
        streams.compute(lambda: [t[slot].sub_(7.0) for t in transfers.targets])
    transfers.close()
    assert streams.copies_left == 0
    streams.run()
    assert not any(target[0].any() for target in transfers.targets)


@pytest.mark.parametrize("order", ORDERS)
def test_closing_waits_for_what_was_started_and_never_placed(order: Choose) -> None:
    streams = SimulatedStreams(order)
    transfers, layer_of = transfers_of(streams, 2, 2)
    with pytest.raises(ZeroDivisionError), transfers.layer(0, layer_of(0)):
        transfers.start(1, layer_of(1))
        raise ZeroDivisionError
    transfers.close()
    assert streams.copies_left == 0
    transfers.close()
    with pytest.raises(Closed):
        transfers.start(2, layer_of(2))


def test_a_layer_is_not_started_over_one_that_is_still_wanted() -> None:
    streams = SimulatedStreams(late("copy"))
    transfers, layer_of = transfers_of(streams, 2)
    for layer in range(SLOTS):
        transfers.start(layer, layer_of(layer))
        transfers.start(layer, layer_of(layer))  # it is already
    with pytest.raises(InvalidInput, match="until layer 0"):
        transfers.start(SLOTS, layer_of(SLOTS))
    assert streams.copies == SLOTS
    transfers.close()


@pytest.mark.parametrize(
    "kv",
    [
        [],
        [torch.zeros(2, 1, 1, 4)],  # too few tokens
        [torch.zeros(1, 1, 2, 4)],
        [torch.zeros(2, 2, 2, 4)],
        [torch.zeros(2, 1, 2, 8)],
        [torch.zeros(2, 1, 2)],
        [torch.zeros(2, 1, 2, 4, dtype=torch.bfloat16)],
        [torch.zeros(2, 1, 2, 4, device="meta")],
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(kv: list[Tensor]) -> None:
    streams = SimulatedStreams(late("copy"))
    transfers, _ = transfers_of(streams, 2)
    with pytest.raises(InvalidInput, match="kv"):
        transfers.start(0, kv)
    assert streams.copies == 0


def test_transfers_can_be_made_and_used_inside_inference_mode_or_not() -> None:
    streams = SimulatedStreams(late("copy"), lambda _: False)
    with torch.inference_mode():
        transfers, layer_of = transfers_of(streams, 2)
        transfers.start(0, layer_of(0))
    transfers.start(1, layer_of(1))
    transfers.close()
    assert float(transfers.targets[0][1].mean()) == 1.0


@pytest.mark.parametrize("name", ["compute", "copy"])
def test_the_simulation_notices_a_layer_that_is_read_before_its_copy(name: Name) -> None:
    """The tests above would pass on a device that always waits: this one does not."""

    class Forgetful(SimulatedStreams):
        def wait(self, event: object) -> None:
            pass

    streams = Forgetful(late(name))
    transfers, layer_of = transfers_of(streams, 2)
    seen: list[float] = []
    for layer in range(1, 4):
        with transfers.layer(layer, layer_of(layer)) as slot:
            streams.compute(lambda slot=slot: seen.append(float(transfers.targets[0][slot].mean())))
    streams.run()
    assert seen != [1.0, 2.0, 3.0]

"""Invariant 5: keys turn once, by one constant shift per chunk and rotary group, with the model's own frequencies."""

from __future__ import annotations

import pytest
import torch

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.model.decoder import Rows
from tests import tiny


def first_layer_keys(engine: Engine, ids: tuple[int, ...], start: int) -> torch.Tensor:
    """Keys [KVH, T, D] of layer 0 for tokens computed at ``start``: they depend on token and position alone."""
    canvas = engine.decoder.new_canvas(start + len(ids))
    at = torch.arange(start, start + len(ids))
    engine.decoder.forward([Rows(canvas, at, torch.tensor(ids))])
    return canvas.k[0, :, start:]


@pytest.mark.parametrize("start", [0, 1, 2, 300])
def test_loaded_keys_are_those_of_the_new_position(engine: Engine, start: int) -> None:
    """Start 0 turns them backwards by the sink's one token, 1 not at all."""
    chunk = Chunk(tiny.random_ids(33, 1))
    engine.precompute([chunk])
    parts = [Text((1, *tiny.random_ids(start - 1, 5)))] if start else []
    prompt = Prompt([*parts, chunk, Text(tiny.random_ids(5, 9))])
    for _ in range(2):  # The second time shows that the stored keys did not turn along.
        canvas = engine.prefill(prompt, Plan("reuse")).canvas
        want = first_layer_keys(engine, chunk.token_ids, start)
        got = canvas.k[0, :, start : start + len(chunk)]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def test_every_layer_turns_by_its_own_group(engine: Engine) -> None:
    """Two loads of one chunk at different places differ by the layer's own rotation, and in length not at all."""
    chunk = Chunk(tiny.random_ids(33, 1))
    engine.precompute([chunk])
    near = engine.prefill(Prompt([Text((1, 4)), chunk, Text((9, 9))]), Plan("reuse")).canvas.k[:, :, 2:35]
    far_prompt = Prompt([Text((1, *tiny.random_ids(200, 5))), chunk, Text((9, 9))])
    far = engine.prefill(far_prompt, Plan("reuse")).canvas.k[:, :, 201:234]
    for layer, rotation in enumerate(engine.decoder.rotations):
        turned = near[layer] if rotation is None else rotation.rotate(near[layer], 199)
        torch.testing.assert_close(far[layer], turned, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(far[layer].norm(dim=-1), near[layer].norm(dim=-1), rtol=1e-4, atol=1e-4)


def test_values_do_not_turn(llama: Engine) -> None:
    chunk = Chunk(tiny.random_ids(33, 1))
    llama.precompute([chunk])
    near = llama.prefill(Prompt([Text((1, 4)), chunk, Text((9, 9))]), Plan("reuse")).canvas.v[:, :, 2:35]
    far = llama.prefill(Prompt([Text((1, *range(50, 80))), chunk, Text((9, 9))]), Plan("reuse")).canvas.v
    assert torch.equal(far[:, :, 31:64], near)


def test_the_same_chunk_twice_turns_twice_from_the_stored_keys(llama: Engine) -> None:
    chunk = Chunk(tiny.random_ids(33, 1))
    llama.precompute([chunk])
    prompt = Prompt([Text((1,)), chunk, Text((9,)), chunk, Text((8,))])
    canvas = llama.prefill(prompt, Plan("reuse")).canvas
    for start in (1, 35):
        want = first_layer_keys(llama, chunk.token_ids, start)
        torch.testing.assert_close(canvas.k[0, :, start : start + 33], want, rtol=1e-4, atol=2e-4)

"""Invariant 2: a row never sees a later position, whatever rows are beside it; windows and soft-caps likewise."""

from __future__ import annotations

import torch

from blend import Engine
from blend.model.decoder import LayerAttention, Observer, Rows
from tests import tiny

LENGTH = 90


def run(engine: Engine, ids: torch.Tensor, positions: list[int], k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] of rows at ``positions`` over a canvas that starts as ``k`` and ``v``."""
    canvas = engine.decoder.new_canvas(LENGTH)
    canvas.k.copy_(k)
    canvas.v.copy_(v)
    at = torch.tensor(positions)
    logits = engine.decoder.forward([Rows(canvas, at, ids[at])], keep="all")
    assert logits is not None
    return logits


def noise(engine: Engine, seed: int) -> torch.Tensor:
    d = engine.decoder
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(d.layers, d.kv_heads, LENGTH, d.head_dim, generator=generator)


def test_later_rows_and_later_cached_positions_change_nothing(engine: Engine) -> None:
    """CacheBlend's released code masks gathered rows from the bottom right, so a row could see later tokens."""
    ids = torch.tensor(tiny.random_ids(LENGTH, 1))
    k, v = noise(engine, 2), noise(engine, 3)
    early = [3, 10, 11, 40, 41]
    alone = run(engine, ids, early, k, v)
    beside = run(engine, ids, [*early, 50, 60, 88], k, v)[: len(early)]
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)

    k2, v2, ids2 = k.clone(), v.clone(), ids.clone()
    k2[:, :, 42:], v2[:, :, 42:] = 1e4, -1e4
    ids2[42:] = 5
    changed = run(engine, ids2, [*early, 50, 60, 88], k2, v2)[: len(early)]
    torch.testing.assert_close(changed, alone, rtol=0, atol=1e-5)


def test_an_earlier_cached_position_does_change_a_row(engine: Engine) -> None:
    ids = torch.tensor(tiny.random_ids(LENGTH, 1))
    k, v = noise(engine, 2), noise(engine, 3)
    before = run(engine, ids, [41], k, v)
    v[:, :, 38] += 1.0
    assert (run(engine, ids, [41], k, v) - before).abs().max() > 1e-4


def test_a_window_hides_what_is_too_far_left(model_of, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with tiny.engine(model_of("mistral-window"), tmp_path) as engine:
        ids = torch.tensor(tiny.random_ids(LENGTH, 1))
        k, v = noise(engine, 2), noise(engine, 3)
        before = run(engine, ids, [41], k, v)
        v[:, :, : 41 - 24 + 1] = 77.0
        torch.testing.assert_close(run(engine, ids, [41], k, v), before, rtol=0, atol=0)
        v[:, :, 41 - 24 + 1] = 77.0
        assert not torch.equal(run(engine, ids, [41], k, v), before)


class _Order(Observer):
    """Counts keys that a pass has written by the time each layer's rows attend."""

    def __init__(self) -> None:
        self.written: list[bool] = []

    def after_write(
        self,
        layer: int,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: LayerAttention,
    ) -> None:
        self.written.append(torch.equal(rows.canvas.k[layer][:, rows.positions], key))


def test_a_layer_writes_every_row_before_any_row_attends(engine: Engine) -> None:
    order = _Order()
    ids = torch.tensor(tiny.random_ids(LENGTH, 1))
    canvas = engine.decoder.new_canvas(LENGTH)
    engine.decoder.forward([Rows(canvas, torch.arange(LENGTH), ids, observer=order)])
    assert order.written == [True] * engine.decoder.layers

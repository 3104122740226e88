from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from blend.errors import InvalidInput, ModelError, ModelUnsupported
from blend.model.decoder import Decoder, LayerAttention, Observer, Rows, StopForward
from blend.recompute.canvas import Canvas
from tests.models import SUPPORTED, VOCABULARY, WINDOW, build

LENGTH = 60
FAMILIES = list(SUPPORTED)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def decoder(family: str) -> Decoder:
    return Decoder(build(family))


@cache
def stock(family: str, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Logits ``[length, V]`` of the untouched model with eager attention."""
    model = build(family)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=tokens(length, seed)[None], use_cache=False).logits[0]


def full(family: str, length: int = LENGTH, seed: int = 0) -> tuple[Canvas, Tensor]:
    canvas = decoder(family).new_canvas(length)
    logits = decoder(family).forward([Rows(canvas, torch.arange(length), tokens(length, seed))], keep="all")
    assert logits is not None
    return canvas, logits


def close(ours: Tensor | None, theirs: Tensor, bound: float = 1e-5) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, theirs, atol=bound * max(1.0, float(theirs.abs().max())), rtol=0)


# What the model computes.


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_are_full_prefill(family: str) -> None:
    close(full(family)[1], stock(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_are_one(family: str) -> None:
    canvas, ids, positions = decoder(family).new_canvas(LENGTH), tokens(LENGTH), torch.arange(LENGTH)
    for part in (slice(0, 37), slice(37, 38), slice(38, LENGTH)):
        logits = decoder(family).forward([Rows(canvas, positions[part], ids[part])], keep="all")
        close(logits, stock(family)[part])


@pytest.mark.parametrize("family", FAMILIES)
def test_scattered_rows_over_a_right_canvas_are_right(family: str) -> None:
    canvas, _ = full(family)
    positions = torch.tensor([0, 3, 4, 17, 30, 31, 32, 48, LENGTH - 1])
    for stored in (canvas.k, canvas.v):
        stored[:, :, positions] = 7.0
    rows = Rows(canvas, positions, tokens(LENGTH)[positions])
    close(decoder(family).forward([rows], keep="all"), stock(family)[positions])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_overwrite_a_wrong_canvas(family: str) -> None:
    canvas = decoder(family).new_canvas(LENGTH)
    for stored in (canvas.k, canvas.v):
        stored.normal_(generator=torch.Generator().manual_seed(3))
    logits = decoder(family).forward([Rows(canvas, torch.arange(LENGTH), tokens(LENGTH))])
    close(logits, stock(family)[-1:])
    right, _ = full(family)
    close(canvas.k, right.k)
    close(canvas.v, right.v)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_of_one_pass_get_what_they_get_alone(family: str) -> None:
    scattered = torch.tensor([2, 9, 33, 50, LENGTH - 1])
    batch = [
        Rows(decoder(family).new_canvas(23), torch.arange(23), tokens(23, seed=5)),
        Rows(full(family)[0], scattered, tokens(LENGTH)[scattered]),
        Rows(full(family)[0], torch.tensor([LENGTH - 1]), tokens(LENGTH)[-1:]),
    ]
    expected = torch.stack((stock(family, 23, 5)[-1], stock(family)[-1], stock(family)[-1]))
    close(decoder(family).forward(batch), expected)
    close(batch[1].canvas.k, full(family)[0].k)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [700, -7, -40])
def test_turned_keys_are_the_keys_of_the_new_position(family: str, shift: int) -> None:
    """In every layer: rows that see only one another differ in position alone."""
    start, length = 40, 20
    ids = tokens(length)
    canvases = []
    for first in (start, start + shift):
        canvas = decoder(family).new_canvas(first + length)
        visible = torch.arange(first + length) >= first
        decoder(family).forward([Rows(canvas, torch.arange(first, first + length), ids, visible)])
        canvases.append(canvas.k[:, :, first:])
    for layer, rotation in enumerate(decoder(family).rotations):
        turned = canvases[0][layer] if rotation is None else rotation.rotate(canvases[0][layer], shift)
        close(turned, canvases[1][layer], bound=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_and_gives_float32_logits(dtype: torch.dtype) -> None:
    half = Decoder(build("llama").to(dtype))
    canvas = half.new_canvas(LENGTH)
    assert canvas.k.dtype == dtype
    logits = half.forward([Rows(canvas, torch.arange(LENGTH), tokens(LENGTH))], keep="all")
    assert logits is not None and logits.dtype == torch.float32
    assert (logits - stock("llama")).norm() / stock("llama").norm() < 0.1


# What a decoder says of its model.


def test_sizes() -> None:
    qwen = decoder("qwen3")
    assert (qwen.layers, qwen.heads, qwen.kv_heads, qwen.head_dim) == (4, 4, 2, 16)
    assert (qwen.vocab_size, qwen.max_positions, qwen.dtype) == (VOCABULARY, 2048, torch.float32)
    assert qwen.new_canvas(9).k.shape == (4, 2, 9, 16)


def test_linear_flops_leave_out_embeddings_tied_or_not() -> None:
    for tied in (False, True):
        model = build("llama", tie_word_embeddings=tied)
        inner = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
        assert Decoder(model).linear_flops_per_row == 2 * inner


def test_rotations_are_shared_within_a_group() -> None:
    llama, smollm3, gemma3 = (decoder(f).rotations for f in ("llama", "smollm3", "gemma3"))
    assert len({id(r) for r in llama}) == 1
    assert smollm3[3] is None and len({id(r) for r in smollm3}) == 2
    assert len({id(r) for r in gemma3}) == 2 and gemma3[5] is not gemma3[0]
    assert gemma3[0] is not None and gemma3[5] is not None
    assert not gemma3[0].same_turn(gemma3[5])


def test_rotations_are_the_models_own() -> None:
    dims = {f: {r and (r.dims, r.pairing) for r in decoder(f).rotations} for f in FAMILIES}
    assert dims["llama"] == {(16, "half")}
    assert dims["phi3-partial"] == dims["gpt-neox"] == {(8, "half")}
    assert dims["cohere"] == {(16, "interleaved")}
    assert dims["glm4"] == {(8, "interleaved")}
    plain, linear = decoder("llama").rotations[0], decoder("llama-linear").rotations[0]
    assert plain is not None and linear is not None
    torch.testing.assert_close(linear.inverse_frequencies * 4, plain.inverse_frequencies)


# Rows and observers.


class Watch(Observer):
    """Keeps what it is shown, and what the canvas holds at that moment."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.held: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.fresh: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.attention: list[LayerAttention] = []
        self.stop_at = stop_at

    def _see(self, when: str, layer: int, rows: Rows) -> None:
        self.calls.append((when, layer))
        at = rows.positions
        self.held[when, layer] = (rows.canvas.k[layer, :, at].clone(), rows.canvas.v[layer, :, at].clone())

    def before_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        self._see("before", layer, rows)
        self.fresh[layer] = (query.clone(), key.clone(), value.clone())
        self.attention.append(attention)

    def after_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        self._see("after", layer, rows)
        if layer == self.stop_at:
            raise StopForward


def test_an_observer_sees_old_and_fresh_kv_of_its_rows_in_every_layer() -> None:
    canvas, _ = full("llama")
    old, positions = (canvas.k.clone(), canvas.v.clone()), torch.tensor([1, 8, 20])
    watch = Watch()
    beside = Rows(decoder("llama").new_canvas(30), torch.arange(30), tokens(30, seed=2))
    decoder("llama").forward([beside, Rows(canvas, positions, tokens(3, seed=4), observer=watch)])
    assert watch.calls == [(when, layer) for layer in range(4) for when in ("before", "after")]
    for layer in range(4):
        query, key, value = watch.fresh[layer]
        assert query.shape == (4, 3, 16) and key.shape == value.shape == (2, 3, 16)
        assert all(
            torch.equal(held, kept[layer, :, positions])
            for held, kept in zip(watch.held["before", layer], old, strict=True)
        )
        assert torch.equal(watch.held["after", layer][0], key) and torch.equal(watch.held["after", layer][1], value)
        assert torch.equal(canvas.k[layer, :, positions], key)


def test_an_observer_is_told_what_attention_the_layer_computes() -> None:
    seen = {}
    for family in ("gemma2", "granite"):
        watch = Watch()
        rows = Rows(decoder(family).new_canvas(5), torch.arange(5), tokens(5), observer=watch)
        decoder(family).forward([rows])
        seen[family] = watch.attention
    assert seen["gemma2"] == [LayerAttention(0.25, window, 50.0) for window in (WINDOW, None) * 2]
    assert seen["granite"] == [LayerAttention(0.3, None, None)] * 4


def test_an_observer_can_end_the_pass() -> None:
    canvas = decoder("llama").new_canvas(LENGTH)
    watch = Watch(stop_at=1)
    rows = Rows(canvas, torch.arange(LENGTH), tokens(LENGTH), observer=watch)
    assert decoder("llama").forward([rows]) is None
    assert watch.calls[-1] == ("after", 1) and len(watch.calls) == 4
    assert canvas.k[1].any() and not canvas.k[2].any()
    close(full("llama")[1], stock("llama"))


def test_attention_that_an_observer_returns_is_what_its_rows_get_alone_in_a_pass() -> None:
    class Silent(Observer):
        def after_write(self, layer: int, rows: Rows, query: Tensor, *_: object) -> Tensor:
            return torch.zeros_like(query)

    def rows(observer: Observer | None) -> Rows:
        return Rows(decoder("llama").new_canvas(LENGTH), torch.arange(LENGTH), tokens(LENGTH), observer=observer)

    alone = decoder("llama").forward([rows(Silent())], keep="all")
    assert alone is not None and not torch.allclose(alone, stock("llama"), atol=0.1)
    twice = decoder("llama").forward([rows(Silent()), rows(None)], keep="all")
    assert twice is not None
    close(twice[:LENGTH], stock("llama"))
    close(twice[LENGTH:], stock("llama"))


def test_an_observer_may_run_another_pass() -> None:
    class Nested(Observer):
        logits: Tensor | None = None

        def after_write(self, layer: int, *_: object) -> None:
            if layer == 2:
                self.logits = full("llama", 11, 8)[1]

    nested = Nested()
    rows = Rows(decoder("llama").new_canvas(LENGTH), torch.arange(LENGTH), tokens(LENGTH), observer=nested)
    close(decoder("llama").forward([rows], keep="all"), stock("llama"))
    close(nested.logits, stock("llama", 11, 8))


def test_an_observers_error_comes_through_and_leaves_nothing_behind() -> None:
    class Broken(Observer):
        def before_write(self, *_: object) -> None:
            raise ZeroDivisionError

    rows = Rows(decoder("llama").new_canvas(5), torch.arange(5), tokens(5), observer=Broken())
    with pytest.raises(ZeroDivisionError):
        decoder("llama").forward([rows])
    close(full("llama")[1], stock("llama"))


def test_invisible_keys_are_not_read() -> None:
    canvas, _ = full("mistral-window")
    positions = torch.tensor([20, 33, 34, 59])
    visible = torch.arange(LENGTH) % 5 != 0
    visible[positions] = False
    outcomes = []
    for garbage in (0.0, 1e3):
        for stored in (canvas.k, canvas.v):
            stored[:, :, ~visible] = garbage
        rows = Rows(canvas, positions, tokens(4), visible)
        outcomes.append(decoder("mistral-window").forward([rows], keep="all"))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], decoder("mistral-window").forward([Rows(canvas, positions, tokens(4))], "all"))


def test_keep_chooses_the_rows_that_get_logits() -> None:
    batch = [Rows(decoder("llama").new_canvas(n), torch.arange(n), tokens(n)) for n in (3, 1, 6)]
    last, everything = decoder("llama").forward(batch), decoder("llama").forward(batch, keep="all")
    assert last is not None and everything is not None
    assert last.shape == (3, VOCABULARY) and everything.shape == (10, VOCABULARY)
    close(last, everything[[2, 3, 9]])


# What is refused.


def test_rows_must_fit_together() -> None:
    canvas, ids = decoder("llama").new_canvas(10), torch.tensor([5, 6])
    for wrong in ([3, 3], [4, 2], [-1, 2], [2, 10]):
        with pytest.raises(InvalidInput, match="strictly ascending from 0 to 9"):
            Rows(canvas, torch.tensor(wrong), ids)
    with pytest.raises(InvalidInput, match="one or more positions"):
        Rows(canvas, torch.tensor([], dtype=torch.int64), ids[:0])
    with pytest.raises(InvalidInput, match="one token a row"):
        Rows(canvas, torch.tensor([1]), ids)
    with pytest.raises(InvalidInput, match="int64"):
        Rows(canvas, torch.tensor([1, 2], dtype=torch.int32), ids)
    with pytest.raises(InvalidInput, match="a bool for each of 10 positions"):
        Rows(canvas, torch.tensor([1, 2]), ids, visible=torch.ones(9, dtype=torch.bool))


def test_forward_refuses_what_is_not_this_models() -> None:
    llama, positions, ids = decoder("llama"), torch.tensor([1, 2]), torch.tensor([5, 6])
    canvas = llama.new_canvas(10)
    with pytest.raises(InvalidInput, match="rows of one or more requests"):
        llama.forward([])
    with pytest.raises(InvalidInput, match="different canvases"):
        llama.forward([Rows(canvas, positions, ids), Rows(canvas, positions + 2, ids)])
    with pytest.raises(InvalidInput, match="last or all"):
        llama.forward([Rows(canvas, positions, ids)], keep="first")
    for other in (decoder("llama-mha").new_canvas(10), decoder("gemma3").new_canvas(10)):
        with pytest.raises(InvalidInput, match="a canvas of this decoder"):
            llama.forward([Rows(other, positions, ids)])
    for wrong in (-1, VOCABULARY):
        with pytest.raises(InvalidInput, match=f"got {wrong}; allowed: 0 to {VOCABULARY - 1}"):
            llama.forward([Rows(canvas, positions, torch.tensor([wrong, 5]))])


def test_the_model_itself_is_no_longer_called_directly() -> None:
    with pytest.raises(ModelError, match=r"Decoder\.forward"):
        decoder("llama").model(input_ids=tokens(4)[None])


def test_a_model_that_wraps_others_is_refused() -> None:
    model = build("llama")
    model.config.get_text_config = lambda decoder=False: build("llama").config
    with pytest.raises(ModelUnsupported, match="other modalities"):
        Decoder(model)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute import attention
from blend.recompute.attention import BLOCK_ROWS, CONVERTED_ROWS, MASKED_ROWS, MERGED_ROWS, Reach

HEADS = [(3, 3), (6, 2), (8, 1)]
"""Query heads and KV heads: groups of 1, 3 and 8."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention of one layer alone."""
    return attention.attend(query, key, value, Reach(positions, window, visible), scale=scale, softcap=softcap)


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """The definition, in float64, over all keys at once."""
    group = query.shape[0] // key.shape[0]
    own, keys = positions[:, None], torch.arange(key.shape[1])
    read = keys <= own
    if window is not None:
        read = read & (own - keys < window)
    if visible is not None:
        read = read & (visible | (keys == own))
    scores = torch.einsum("hrd,hnd->hrn", query.double(), key.double().repeat_interleave(group, 0)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~read, float("-inf")).softmax(-1)
    return torch.einsum("hrn,hnd->hrd", weights, value.double().repeat_interleave(group, 0))


def some(heads: int, kv_heads: int, rows: int, keys: int, dims: int, seed: int = 0) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    positions = torch.randperm(keys, generator=made)[:rows].sort().values
    shapes = (heads, rows, dims), (kv_heads, keys, dims), (kv_heads, keys, dims)
    return (*(torch.randn(shape, generator=made) for shape in shapes), positions)


def close(ours: Tensor, theirs: Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("rows", "keys", "dims"), [(1, 1, 8), (1, 37, 8), (7, 53, 5), (31, 31, 16), (201, 230, 3)])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("hidden", [False, True])
def test_equals_the_naive_sum(
    heads: int, kv_heads: int, rows: int, keys: int, dims: int, window: int | None, softcap: float | None, hidden: bool
) -> None:
    query, key, value, positions = some(heads, kv_heads, rows, keys, dims)
    visible = torch.arange(keys) % 3 != 1 if hidden else None
    options = {"scale": 0.7, "window": window, "softcap": softcap, "visible": visible}
    out = attend(query, key, value, positions, **options)
    assert out.dtype == query.dtype and out.shape == query.shape
    close(out, naive(query, key, value, positions, **options))


@pytest.mark.parametrize("first", [0, 1, 700])
@pytest.mark.parametrize("rows", [2, MASKED_ROWS + 1, MERGED_ROWS, 2 * MERGED_ROWS + MASKED_ROWS + 3])
def test_two_parts_make_the_whole(first: int, rows: int) -> None:
    made = torch.Generator().manual_seed(rows)
    keys = first + 2 * rows
    positions = first + torch.randperm(2 * rows, generator=made)[:rows].sort().values
    positions[0] = first
    query, key, value, _ = some(6, 2, rows, keys, 8)
    assert Reach(positions).merges(query) == (first > 0 or positions[-1] != rows - 1)
    close(attend(query, key, value, positions, scale=0.4), naive(query, key, value, positions, scale=0.4))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equals_the_naive_sum_for_any_rows(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 40))
    positions = torch.tensor(sorted(data.draw(st.sets(st.integers(0, keys - 1), min_size=1))))
    window = data.draw(st.none() | st.integers(1, keys + 2))
    visible = data.draw(st.none() | st.lists(st.booleans(), min_size=keys, max_size=keys).map(torch.tensor))
    query, key, value, _ = some(4, 2, len(positions), keys, 8)
    options = {"scale": 0.3, "window": window, "visible": visible}
    close(attend(query, key, value, positions, **options), naive(query, key, value, positions, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [41, CONVERTED_ROWS + 5])
@pytest.mark.parametrize("units", [False, True])
def test_half_precision_rounds_only(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, softcap: float | None, rows: int, units: bool
) -> None:
    monkeypatch.setattr(attention, "matrix_units", lambda: units)
    query, key, value, positions = some(6, 2, rows, 2 * rows + 15, 16)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = attend(query, key, value, positions, scale=0.25, softcap=softcap)
    assert out.dtype == dtype
    close(out, naive(query, key, value, positions, scale=0.25, softcap=softcap), atol=2e-2)


def spread(tensor: Tensor) -> Tensor:
    """The same numbers with gaps of NaN between them."""
    return torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)[..., 0].copy_(tensor)


@pytest.mark.parametrize("layout", [spread, lambda tensor: tensor.mT.contiguous().mT], ids=["spread", "transposed"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("rows", "keys"), [(31, 31), (70, 300), (MERGED_ROWS + 9, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_of_memory_is_read_right(
    layout: Callable[[Tensor], Tensor],
    window: int | None,
    softcap: float | None,
    rows: int,
    keys: int,
    dtype: torch.dtype,
) -> None:
    *made, positions = some(6, 2, rows, keys, 16)
    query, key, value = (tensor.to(dtype) for tensor in made)
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    want = naive(query, key, value, positions, **options)
    out = attend(layout(query), layout(key), layout(value), positions, **options)
    close(out, want, atol=2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("full", [False, True])
def test_later_positions_change_no_bit(window: int | None, softcap: float | None, full: bool) -> None:
    rows = BLOCK_ROWS + 37
    query, key, value, positions = some(6, 2, rows, rows if full else 2 * rows + 1, 8)
    options = {"scale": 0.5, "window": window, "softcap": softcap}
    before = attend(query, key, value, positions, **options)
    for row in (0, 5, BLOCK_ROWS - 1, BLOCK_ROWS, rows - 2):
        other_key, other_value = key.clone(), value.clone()
        later = int(positions[row]) + 1
        other_key[:, later:] = 1e4 * torch.randn_like(other_key[:, later:])
        other_value[:, later:] = -1e4
        after = attend(query, other_key, other_value, positions, **options)
        assert torch.equal(after[:, : row + 1], before[:, : row + 1])


def test_what_no_row_may_read_is_not_even_loaded() -> None:
    query, key, value, _ = some(6, 2, 3, 60, 8)
    positions = torch.tensor([40, 41, 45])
    before = attend(query, key, value, positions, scale=0.5, window=4)
    for stored in (key, value):
        stored[:, 46:] = stored[:, :37] = float("nan")
    assert torch.equal(attend(query, key, value, positions, scale=0.5, window=4), before)


def test_invisible_and_out_of_window_keys_change_no_bit() -> None:
    query, key, value, positions = some(6, 2, 50, 120, 8)
    visible = torch.arange(120) % 4 != 0
    visible[positions] = False
    before = attend(query, key, value, positions, scale=0.5, visible=visible)
    unread = ~visible
    unread[positions] = False
    key[:, unread], value[:, unread] = 1e3, -1e3
    assert torch.equal(attend(query, key, value, positions, scale=0.5, visible=visible), before)


def test_with_nothing_visible_a_row_reads_itself() -> None:
    query, key, value, positions = some(6, 2, 9, 20, 8)
    out = attend(query, key, value, positions, scale=0.5, visible=torch.zeros(20, dtype=torch.bool))
    close(out, value[:, positions].repeat_interleave(3, 0).double())


def test_window_is_the_number_of_keys_read() -> None:
    alike, one_hot = torch.zeros(1, 30, 30), torch.eye(30)[None]
    out = attend(alike[:, :1], alike, one_hot, torch.tensor([20]), scale=1.0, window=5)
    assert out[0, 0].nonzero().flatten().tolist() == [16, 17, 18, 19, 20]


def test_a_window_longer_than_the_prompt_is_none() -> None:
    assert Reach(torch.arange(10), window=10).causal
    assert not Reach(torch.arange(10), window=9).causal


def test_one_reach_serves_many_layers() -> None:
    query, key, value, positions = some(6, 2, 50, 120, 8)
    reach = Reach(positions, window=11)
    for layer in range(3):
        expected = attend(query, key + layer, value, positions, scale=0.5, window=11)
        assert torch.equal(attention.attend(query, key + layer, value, reach, scale=0.5), expected)


def test_masks_too_large_to_keep_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, positions = some(6, 2, BLOCK_ROWS + 9, 500, 8)
    kept, anew = Reach(positions), Reach(positions)
    expected = attention.attend(query, key, value, kept, scale=0.5)
    assert kept.bias(0, 3, torch.float32) is kept.bias(0, 3, torch.float32)
    monkeypatch.setattr(attention, "KEPT_BYTES", 1000)
    assert torch.equal(attention.attend(query, key, value, anew, scale=0.5), expected)
    assert anew.bias(0, 3, torch.float32) is not anew.bias(0, 3, torch.float32)


def test_refuses_what_does_not_fit() -> None:
    query, key, value, positions = some(4, 2, 5, 9, 8)
    with pytest.raises(InvalidInput, match="one row for each of the 4 positions"):
        attend(query, key, value, positions[:4], scale=1.0)
    with pytest.raises(InvalidInput, match="multiples of the 2 KV heads"):
        attend(query[:3], key, value, positions, scale=1.0)
    with pytest.raises(InvalidInput, match="window"):
        attend(query, key, value, positions, scale=1.0, window=0)
    with pytest.raises(InvalidInput, match="positions"):
        attend(query[:, :0], key, value, positions[:0], scale=1.0)

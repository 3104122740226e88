from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.rope import Pairing, Rotation

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def frequencies(pairs: int, theta: float = 1e4) -> Tensor:
    return 1.0 / theta ** (torch.arange(pairs) / pairs)


def naive(keys: Tensor, rotation: Rotation, shift: int) -> Tensor:
    """One pair after another as complex numbers, in float64."""
    out = keys.double().clone()
    pairs = len(rotation.inverse_frequencies)
    for pair, frequency in enumerate(rotation.inverse_frequencies.double()):
        i, j = (pair, pair + pairs) if rotation.pairing == "half" else (2 * pair, 2 * pair + 1)
        turned = torch.complex(out[..., i], out[..., j]) * torch.polar(
            torch.ones((), dtype=torch.float64), frequency * shift
        )
        out[..., i], out[..., j] = turned.real.clone(), turned.imag.clone()
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shift", [1, -1, 37, -511, 5_000, 131_000])
@pytest.mark.parametrize(("pairs", "dims"), [(1, 2), (4, 8), (3, 11), (16, 64)])
def test_turns_pairs_like_complex_numbers(pairing: Pairing, shift: int, pairs: int, dims: int) -> None:
    keys = torch.randn(2, 3, 7, dims)
    rotation = Rotation(frequencies(pairs), pairing)
    torch.testing.assert_close(rotation.rotate(keys, shift).double(), naive(keys, rotation, shift), atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(-9000, 9000), st.integers(-9000, 9000), st.sampled_from(PAIRINGS), st.sampled_from([6, 7, 12]))
def test_turns_add_up(first: int, second: int, pairing: Pairing, dims: int) -> None:
    keys = torch.randn(2, 5, dims, generator=torch.Generator().manual_seed(0))
    rotation = Rotation(frequencies(3), pairing)
    twice = rotation.rotate(rotation.rotate(keys, first), second)
    torch.testing.assert_close(twice, rotation.rotate(keys, first + second), atol=2e-6, rtol=0)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_keeps_lengths_and_the_dimensions_that_do_not_turn(pairing: Pairing) -> None:
    keys = torch.randn(3, 5, 12)
    turned = Rotation(frequencies(4), pairing).rotate(keys, 77)
    assert torch.equal(turned[..., 8:], keys[..., 8:])
    torch.testing.assert_close(turned.norm(dim=-1), keys.norm(dim=-1))


def test_shift_zero_gives_the_keys_and_other_shifts_leave_them_alone() -> None:
    keys = torch.randn(3, 5, 8)
    before = keys.clone()
    rotation = Rotation(frequencies(4), "half")
    assert rotation.rotate(keys, 0) is keys
    assert rotation.rotate(keys, 5).data_ptr() != keys.data_ptr()
    assert torch.equal(keys, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_computes_in_float32_and_casts_once(dtype: torch.dtype, pairing: Pairing) -> None:
    keys = torch.randn(2, 9, 16).to(dtype)
    rotation = Rotation(frequencies(8), pairing)
    turned = rotation.rotate(keys, -123)
    assert turned.dtype == dtype
    assert torch.equal(turned, rotation.rotate(keys.float(), -123).to(dtype))


def test_takes_keys_that_are_no_contiguous_block() -> None:
    keys = torch.randn(5, 3, 8).transpose(0, 1)
    rotation = Rotation(frequencies(4), "half")
    assert torch.equal(rotation.rotate(keys, 9), rotation.rotate(keys.contiguous(), 9))


def test_keeps_its_own_frequencies() -> None:
    buffer = frequencies(4)
    rotation = Rotation(buffer, "half")
    buffer.zero_()
    assert torch.equal(rotation.inverse_frequencies, frequencies(4))


def test_same_turn_is_frequencies_and_pairing() -> None:
    rotation = Rotation(frequencies(4), "half")
    assert rotation.same_turn(Rotation(frequencies(4), "half"))
    assert not rotation.same_turn(Rotation(frequencies(4), "interleaved"))
    assert not rotation.same_turn(Rotation(frequencies(4, 1e6), "half"))
    assert not rotation.same_turn(Rotation(frequencies(3), "half"))


def test_refuses_what_it_cannot_turn() -> None:
    with pytest.raises(InvalidInput, match="last dimension of 8 or more"):
        Rotation(frequencies(4), "half").rotate(torch.randn(2, 6), 1)
    with pytest.raises(InvalidInput, match="inverse_frequencies"):
        Rotation(torch.ones(2, 2), "half")
    with pytest.raises(InvalidInput, match="half or interleaved"):
        Rotation(frequencies(4), "diagonal")

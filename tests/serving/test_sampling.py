"""Tokens from logits; text that ends before a stop string."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blend import Sampling
from blend.errors import InvalidInput
from blend.serving.sampling import Sampler, StopText, choose

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.9, -2.0])


def drawn(sampling: Sampling, logits: torch.Tensor = LOGITS, count: int = 200) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_takes_the_likeliest_whatever_the_other_settings() -> None:
    assert set(drawn(Sampling(seed=3, top_k=2))) == {1}


def test_a_seed_decides_and_no_seed_does_not() -> None:
    seeded = Sampling(temperature=1.0, seed=7)
    assert drawn(seeded) == drawn(seeded) != drawn(Sampling(temperature=1.0, seed=8))
    assert drawn(Sampling(temperature=1.0)) != drawn(Sampling(temperature=1.0))


def test_noise_in_the_last_bits_changes_no_token() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 1e-6
    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=200, seed=5)
    assert drawn(sampling, logits) == drawn(sampling, logits + noise)


def test_frequencies_are_those_of_the_softmax() -> None:
    got = torch.bincount(torch.tensor(drawn(Sampling(temperature=0.7, seed=1), count=20_000)), minlength=5) / 20_000
    assert torch.allclose(got, (LOGITS / 0.7).softmax(-1), atol=0.015)


def test_cuts_leave_the_likeliest_tokens() -> None:
    assert set(drawn(Sampling(temperature=2.0, top_k=2, seed=0))) == {1, 3}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.5, seed=0))) == {1, 3}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.1, seed=0))) == {1}
    assert set(drawn(Sampling(temperature=1.0, top_k=99, seed=0), count=2000)) == {0, 1, 2, 3, 4}
    whole = Sampler(Sampling(temperature=1.0, top_p=0.95)).probabilities(LOGITS)
    assert (whole > 0).tolist() == [False, True, True, True, False]


@given(st.floats(0, 100) | st.floats(0, 1e-3), st.floats(0.01, 1), st.integers(0, 12), st.integers(0, 2**63 - 1))
def test_what_is_drawn_is_never_what_was_cut(temperature: float, top_p: float, top_k: int, seed: int) -> None:
    sampling = Sampling(temperature, top_p, top_k, seed)
    if Sampler(sampling).greedy:
        assert set(drawn(sampling, count=20)) == {1}
        return
    allowed = Sampler(sampling).probabilities(LOGITS) > 0
    assert allowed.any()
    assert all(allowed[token] for token in drawn(sampling, count=20))


@pytest.mark.parametrize("temperature", [1e-50, 9e-6, 1e-5, 2e-5])
def test_next_to_no_temperature_takes_the_likeliest(temperature: float) -> None:
    assert set(drawn(Sampling(temperature=temperature, seed=0))) == {1}
    assert set(drawn(Sampling(temperature=temperature, seed=0), LOGITS * 1e4)) == {1}


def test_a_token_that_was_not_taken_is_drawn_by_the_same_number_again() -> None:
    sampler, once = Sampler(Sampling(temperature=5.0, seed=1)), Sampler(Sampling(temperature=5.0, seed=1))
    found = []
    for _ in range(50):
        (token,) = {sampler.propose(LOGITS) for _ in range(3)}
        sampler.taken()
        found.append(token)
    assert found == [once.choose(LOGITS) for _ in range(50)]


def test_requests_choose_each_by_its_own_settings() -> None:
    samplers = [Sampler(Sampling()), Sampler(Sampling(temperature=5.0, seed=1)), Sampler(Sampling())]
    other = LOGITS.flip(0)
    got = choose(torch.stack([LOGITS, LOGITS, other]), samplers)
    assert got == [1, Sampler(Sampling(temperature=5.0, seed=1)).choose(LOGITS), 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 101, float("nan"), "1", True, None)),
        *(("top_p", value) for value in (0, -1, 1.1, float("nan"), "1")),
        *(("top_k", value) for value in (-1, 1.5, 2**31, True)),
        *(("seed", value) for value in (-1, 2**63, 1.0, True)),
        *(("stop", value) for value in ("end", ("",), (1,), None, ("a",) * 17, ("a" * 257,))),
        *(("max_new_tokens", value) for value in (0, -1, 1.0, True)),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        Sampling(**{field: value})
    assert raised.value.field == field


def test_text_stops_before_the_first_stop_string_across_pieces() -> None:
    text = StopText(["\n\n", "END"])
    shown = [text.push(piece) for piece in ("one\n", "two E", "N", "X E", "ND of it")]
    assert shown == ["one", "\ntwo ", "", "ENX ", ""]
    assert text.stopped
    assert text.push("more") == ""


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_is_the_text_up_to_the_stop_string_and_never_part_of_one(
    pieces: list[str], stops: list[str]
) -> None:
    text, whole, shown = StopText(stops), "", ""
    for piece in pieces:
        whole += piece
        shown += text.push(piece)
        found = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
        assert text.stopped == bool(found)
        if found:
            assert shown == whole[: min(found)]
            return
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(st.floats(0.01, 0.999), st.integers(0, 1000), st.floats(0.1, 8))
def test_the_nucleus_is_the_fewest_likeliest_tokens_that_have_the_share(top_p: float, seed: int, spread: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * spread
    kept = Sampler(Sampling(temperature=1.0, top_p=top_p)).probabilities(logits) > 0
    shares = logits.double().softmax(-1)
    assert float(shares[kept].sum()) >= top_p - 1e-5
    assert float(shares[kept].sum() - shares[kept].min()) <= top_p + 1e-5
    assert not (~kept).any() or shares[kept].min() >= shares[~kept].max()

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blend.errors import ModelUnsupported
from blend.model import decoder as decoder_module
from blend.model import support
from blend.model.decoder import Decoder
from blend.recompute import attention
from blend.recompute.attention import Reach
from tests.models import REFUSED, SUPPORTED, build


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", SUPPORTED)
def test_supported(family: str) -> None:
    support.check(Decoder(build(family)))


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_with_the_reason(family: str) -> None:
    model = build(family)
    model.config.name_or_path = f"some/{family}"
    with pytest.raises(ModelUnsupported, match=REFUSED[family][2]) as caught:
        support.check(Decoder(model))
    assert caught.value.model == f"some/{family}"


def test_random_state_is_left_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    support.check(Decoder(build("smollm3")))
    assert torch.equal(torch.rand(3), expected)


def test_the_model_is_left_alone() -> None:
    model = build("gemma2")
    before, config = {n: p.clone() for n, p in model.named_parameters()}, model.config.to_dict()
    found = Decoder(model)
    support.check(found)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert model.config.to_dict() == config
    assert found.model.config._attn_implementation == decoder_module.ATTENTION


# The self-tests see what a configuration does not say.


def hide_rope_type(model: Any) -> Any:
    """The model turns as before, but its configuration claims plain rotary embedding."""
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "default"}
    return model


def test_a_rotation_that_depends_on_the_length_shows_in_the_keys() -> None:
    model = build("phi3-longrope")
    model.model.rotary_emb.config = copy.deepcopy(model.config)
    with pytest.raises(ModelUnsupported, match="layer 0"):
        Decoder(hide_rope_type(model))


def test_a_rotation_that_depends_on_how_far_others_reach_shows_in_the_keys() -> None:
    model = build("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def stretched(x: Tensor, position_ids: Tensor) -> Any:
        return plain(x, position_ids=position_ids / 2 if int(position_ids.max()) > 1000 else position_ids)

    rotary.forward = stretched
    with pytest.raises(ModelUnsupported, match="total length"):
        Decoder(model)


def test_frequencies_that_the_model_does_not_hold_are_refused() -> None:
    model = build("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids=position_ids * 1.01)
    with pytest.raises(ModelUnsupported, match="turned by frequencies that the model holds"):
        Decoder(model)


def test_hidden_states_that_follow_the_position_are_refused() -> None:
    model = build("smollm3")

    def louder(_: Any, args: Any, kwargs: Any) -> Any:
        at = kwargs["position_ids"][0, :, None].float()
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * (1 + at / 1000)}

    model.model.layers[2].self_attn.register_forward_pre_hook(louder, with_kwargs=True)
    with pytest.raises(ModelUnsupported, match="layer 2"):
        Decoder(model)


def test_layers_that_never_ask_for_attention_are_refused() -> None:
    model = build("llama")
    model.model.layers[3].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelUnsupported, match="only 3 of 4 layers"):
        Decoder(model)


def test_layers_out_of_order_are_refused() -> None:
    model = build("llama")
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(ModelUnsupported, match="layer 1 where layer 2"):
        Decoder(model)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.1}, "dropout"),
        ({"something_new": 3}, "something_new"),
    ],
)
def test_attention_arguments_of_unknown_meaning_are_refused(
    more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = decoder_module._rows_attention

    def called_with_more(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, **more})

    monkeypatch.setitem(decoder_module.AttentionInterface._global_mapping, decoder_module.ATTENTION, called_with_more)
    with pytest.raises(ModelUnsupported, match=reason):
        Decoder(build("llama"))


def test_chunked_attention_shows_in_the_logits_when_the_configuration_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "_LAYER_TYPES", frozenset(("full_attention", "chunked_attention")))
    model = build("llama4", attn_temperature_tuning=False)
    with pytest.raises(ModelUnsupported, match=r"rows give other logits|turned by frequencies"):
        support.check(Decoder(model))


@pytest.mark.parametrize(
    ("family", "lost"), [("gemma2", "softcap"), ("gemma2", "window"), ("mistral-window", "window")]
)
def test_a_lost_window_or_soft_cap_shows_in_the_logits(family: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Decoder(build(family))
    attend = attention.attend

    def forgetful(
        query: Tensor, key: Tensor, value: Tensor, reach: Reach, *, scale: float, softcap: float | None
    ) -> Tensor:
        if lost == "softcap":
            return attend(query, key, value, reach, scale=scale)
        return attend(query, key, value, Reach(reach.positions), scale=scale, softcap=softcap)

    monkeypatch.setattr(attention, "attend", forgetful)
    with pytest.raises(ModelUnsupported, match="full rows give other logits"):
        support.check(found)


def test_a_model_that_cannot_be_made_small_is_refused() -> None:
    found = Decoder(build("llama"))
    found.model.config.hidden_act = "no such activation"
    with pytest.raises(ModelUnsupported, match="no small copy of it can be built"):
        support.check(found)


@pytest.mark.parametrize("family", ["gemma3", "smollm3", "qwen2-window", "llama"])
def test_the_copy_is_small_and_keeps_every_kind_of_layer(family: str) -> None:
    found = Decoder(build(family, num_hidden_layers=24, max_window_layers=3) if family != "gemma3" else build(family))
    small = support._small_copy(found)
    assert sum(p.numel() for p in small.parameters()) < 1_000_000
    assert set(getattr(small.config, "layer_types", None) or ()) == set(
        getattr(found.model.config, "layer_types", None) or ()
    )
    kinds = {r and r.dims for r in Decoder(small).rotations}
    assert kinds == {r and r.dims for r in found.rotations}

"""CacheBlend's released code: what it computes, and what its mask lets rows see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.eval.methods import prefill
from blend.eval.methods.released import under_released_mask
from blend.model.decoder import Decoder, Rows
from tests import tiny

WHERE = "evaluation"
NAME = "deviation-released"
LENGTH = 60


def run(decoder: Decoder, rows: list[int], changed: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits ``[R, V]`` of rows over a canvas of noise, and their values ``[R, KVH, D]`` in layer 1.

    ``changed``: a position whose V is another's. Layer 1 depends on what a row sees itself; the logits also on what
    rows that it sees have seen.
    """
    generator = torch.Generator().manual_seed(1)
    canvas = decoder.new_canvas(LENGTH)
    canvas.k.normal_(generator=generator)
    canvas.v.normal_(generator=generator)
    if changed is not None:
        canvas.v[:, :, changed] += 3.0
    ids = torch.tensor(tiny.random_ids(len(rows), 2))
    logits = decoder.forward([Rows(canvas, torch.tensor(rows), ids)], keep="all")
    assert logits is not None
    return logits, canvas.v[1, :, rows].transpose(0, 1)


def test_under_the_released_mask_rows_see_later_tokens_and_in_the_engine_they_do_not(engine: Engine) -> None:
    rows, later = [4, 20, 21, LENGTH - 1], 40
    own, released = engine.decoder, under_released_mask(engine.decoder, LENGTH)
    torch.testing.assert_close(run(own, rows, later)[0][:3], run(own, rows)[0][:3], rtol=0, atol=0)
    assert ((run(released, rows, later)[0] - run(released, rows)[0])[:3].abs().amax(-1) > 1e-3).all()


def test_row_i_of_r_sees_the_keys_up_to_n_minus_r_plus_i(engine: Engine) -> None:
    rows = [4, 20, 21, LENGTH - 1]
    released = under_released_mask(engine.decoder, LENGTH)
    _, before = run(released, rows)
    for i in range(3):
        last = LENGTH - len(rows) + i
        assert (run(released, rows, last)[1][i] - before[i]).abs().max() > 1e-3
        torch.testing.assert_close(run(released, rows, last + 1)[1][i], before[i], rtol=0, atol=0)


def test_where_everything_is_a_row_the_mask_is_the_causal_one(engine: Engine) -> None:
    rows = list(range(LENGTH))
    released = under_released_mask(engine.decoder, LENGTH)
    torch.testing.assert_close(run(released, rows)[0], run(engine.decoder, rows)[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("method", "leaks"), [(NAME, True), ("deviation", False)])
def test_in_a_prompt_a_row_of_the_first_chunk_depends_on_the_last_chunk(
    engine: Engine, prompt: Prompt, method: str, leaks: bool
) -> None:
    other = Prompt([*prompt.segments[:-2], Chunk(tiny.random_ids(49, 77)), prompt.segments[-1]])
    assert len(other) == len(prompt)
    engine.precompute(tiny.chunks_of(other), namespace=WHERE)
    a, b = (prefill(engine, method, 0.3, p, namespace=WHERE, positions=True) for p in (prompt, other))
    end = len(prompt.segments[0]) + len(prompt.segments[1])
    both = set(a.report.recomputed_positions or ()) & set(b.report.recomputed_positions or ()) & set(range(end))
    assert both
    at = torch.tensor(sorted(both))
    difference = (a.canvas.v[2:, :, at] - b.canvas.v[2:, :, at]).abs().max()
    assert (difference > 1e-2) if leaks else (difference < 1e-5)


def test_ratio_one_is_full_prefill(engine: Engine, prompt: Prompt) -> None:
    full = engine.prefill(prompt, Plan("full"), namespace=WHERE)
    got = prefill(engine, NAME, 1.0, prompt, namespace=WHERE)
    torch.testing.assert_close(got.logits, full.logits, rtol=0, atol=1e-3)


def test_only_the_last_token_is_always_computed(engine: Engine, prompt: Prompt) -> None:
    got = prefill(engine, NAME, 0.0, prompt, namespace=WHERE, positions=True)
    assert got.report.recomputed_positions == (len(prompt) - 1,)
    assert got.report.selected == 0


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
def test_the_charge_is_two_layers_in_full_and_the_chosen_cached_tokens(
    engine: Engine, prompt: Prompt, ratio: float
) -> None:
    report = prefill(engine, NAME, ratio, prompt, namespace=WHERE, positions=True).report
    cached = {i for start, end, s in prompt.spans() if isinstance(s, Chunk) for i in range(start, end)}
    rows = report.recomputed_positions or ()
    assert len(rows) == int((len(prompt) - 1) * ratio) + 1
    assert (report.cached, report.selected) == (len(cached), len(cached & set(rows)))
    layers = engine.decoder.layers
    assert report.charged_ratio == pytest.approx(2 / layers + report.selected / len(cached))


def test_what_is_missing_is_encoded_by_itself_too(engine: Engine, prompt: Prompt) -> None:
    stored = prefill(engine, NAME, 0.2, prompt, namespace=WHERE)
    fresh = prefill(engine, NAME, 0.2, prompt, namespace="nothing")
    assert (stored.report.cached > 0, fresh.report.cached) == (True, 0)
    torch.testing.assert_close(fresh.logits, stored.logits, rtol=0, atol=1e-3)


def test_slices_change_nothing(model: Path, tmp_path: Path) -> None:
    made = tiny.prompt()
    got = []
    for rows in (16, 4096):
        with tiny.engine(model, tmp_path / str(rows), max_rows=rows) as engine:
            got.append(prefill(engine, NAME, 0.3, made, namespace=WHERE).logits)
    torch.testing.assert_close(got[0], got[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("ratio", [0.05, 0.16, 0.6])
def test_it_computes_what_the_released_code_computes(engine: Engine, prompt: Prompt, ratio: float) -> None:
    text = Text(tiny.random_ids(7, 9))  # plain text between chunks, which that code encodes by itself as well
    made = Prompt([*prompt.segments[:2], text, *prompt.segments[2:]])
    got = prefill(engine, NAME, ratio, made, namespace=WHERE, positions=True)
    logits, rows = released(engine, made, ratio)
    assert got.report.recomputed_positions == tuple(rows.tolist())
    torch.testing.assert_close(got.logits, logits, rtol=0, atol=2e-3)


def released(engine: Engine, prompt: Prompt, ratio: float) -> tuple[Tensor, Tensor]:
    """The released code line by line on the model's own modules: logits ``[V]`` and the rows that it chose.

    Parts are collected with keys that are not turned yet, as there, and layers have its status 0, 1 and 2.
    """
    model = engine.decoder.model.model
    old = collect(engine, prompt)
    ids = torch.tensor(prompt.token_ids)
    total, positions, hidden = len(ids), torch.arange(len(ids)), model.embed_tokens(ids)
    chosen = positions
    for number, layer in enumerate(model.layers):
        q, k, v = project(layer, hidden)
        turn = rotate(model, positions)
        q, k = turn(q), turn(k)
        if number >= 1:
            old_k, old_v = rotate(model, torch.arange(total))(old[number][0]), old[number][1].clone()
        if number == 1:
            difference = ((v - old_v)[:, :-1] ** 2).sum((0, 2))
            top = difference.topk(int((total - 1) * ratio)).indices.sort().values
            chosen = torch.cat((top, torch.tensor([total - 1])))
            q, positions, hidden = q[:, chosen], positions[chosen], hidden[chosen]
        if number >= 2:
            old_k[:, chosen], old_v[:, chosen] = k, v
            k, v = old_k, old_v
        mask = torch.ones(q.shape[1], total, dtype=torch.bool).tril(total - q.shape[1])
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
        hidden = hidden + layer.self_attn.o_proj(out.transpose(0, 1).flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return engine.decoder.model.lm_head(model.norm(hidden))[-1], chosen


def collect(engine: Engine, prompt: Prompt) -> list[tuple[Tensor, Tensor]]:
    """For each layer keys, not turned, and values ``[KVH, N, D]`` of all parts, each computed by itself."""
    model = engine.decoder.model.model
    parts: list[list[tuple[Tensor, Tensor]]] = []
    for start, _, segment in prompt.spans():
        before = engine.sink if start else ()
        ids = torch.tensor((*before, *segment.token_ids))
        hidden, found = model.embed_tokens(ids), []
        for layer in model.layers:
            q, k, v = project(layer, hidden)
            found.append((k[:, len(before) :], v[:, len(before) :]))
            turn = rotate(model, torch.arange(len(ids)))
            out = scaled_dot_product_attention(turn(q)[None], turn(k)[None], v[None], is_causal=True, enable_gqa=True)
            hidden = hidden + layer.self_attn.o_proj(out[0].transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        parts.append(found)
    return [
        (torch.cat([k for k, _ in layer], 1), torch.cat([v for _, v in layer], 1)) for layer in zip(*parts, strict=True)
    ]


def project(layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Queries, keys and values ``[heads, R, D]`` of a layer's input, not turned."""
    normed, own = layer.input_layernorm(hidden), layer.self_attn
    q, k, v = (
        p(normed).unflatten(-1, (-1, own.head_dim)).transpose(0, 1) for p in (own.q_proj, own.k_proj, own.v_proj)
    )
    return q, k, v


def rotate(model, positions: Tensor) -> Callable[[Tensor], Tensor]:  # type: ignore[no-untyped-def]
    """What turns ``[heads, R, D]`` to positions."""
    cos, sin = model.rotary_emb(torch.zeros(1), positions[None])
    return lambda x: apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]

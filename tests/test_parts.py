"""Parts of chunks in a prompt: rows of the whole chunk's KV, where the prompt has them and not one position off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blend import Chunk, Engine, Part, Plan, Prompt, Text
from blend.errors import InvalidPrompt
from blend.model.decoder import Rows
from tests import tiny

CHUNK = Chunk(tiny.random_ids(40, 1))
OTHER = Chunk(tiny.random_ids(25, 2))
QUESTION = Text(tiny.random_ids(9, 3))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["torch", "reference"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path_factory.mktemp("store"), kernels=request.param) as made:
        yield made


def behind(header: int, *segments: Chunk | Part | Text) -> Prompt:
    """The segments behind a header of so many tokens, a question behind them."""
    return Prompt([Text((1, *tiny.random_ids(header - 1, 4))), *segments, QUESTION])


def by_hand(engine: Engine, prompt: Prompt) -> torch.Tensor:
    """Logits of the last token: each part's rows are cut out of its whole chunk's, turned, and put where it stands."""
    decoder, length = engine.decoder, len(prompt)
    canvas, held = decoder.new_canvas(length), torch.zeros(length, dtype=torch.bool)
    for start, part in prompt.parts():
        whole = engine.prefill(Prompt([Text((1,)), part.chunk, Text((5,))]), Plan("reuse")).canvas
        rows, here = slice(1 + part.first, 1 + part.end), slice(start, start + len(part))
        held[here] = True
        for layer, rotation in enumerate(decoder.rotations):
            keys = whole.k[layer, :, rows]
            shift = start - (1 + part.first)
            canvas.k[layer, :, here] = keys if rotation is None else rotation.rotate(keys, shift)
            canvas.v[layer, :, here] = whole.v[layer, :, rows]
    rows_left = (~held).nonzero().squeeze(1)
    with torch.inference_mode():
        found = decoder.forward([Rows(canvas, rows_left, torch.tensor(prompt.token_ids)[rows_left])])
    assert found is not None
    return found[0]


@pytest.mark.parametrize("span", [(0, 40), (3, 40), (0, 33), (7, 31), (39, 40)], ids=str)
@pytest.mark.parametrize("header", [1, 30])
def test_a_part_is_rows_of_its_whole_chunk(engine: Engine, span: tuple[int, int], header: int) -> None:
    engine.precompute([CHUNK, OTHER])
    prompt = behind(header, Text((7,)), Part(CHUNK, *span), Text((8, 9)), Part(OTHER, 1, 24), OTHER)
    got = engine.prefill(prompt, Plan("reuse"))
    torch.testing.assert_close(got.logits, by_hand(engine, prompt), rtol=1e-4, atol=1e-4)
    assert got.report.cached == span[1] - span[0] + 23 + 25
    first, *_ = got.report.chunks
    assert (first.outcome, first.key) == ("hit", engine.content_key(CHUNK))
    assert (first.start, first.tokens) == (header + 1, span[1] - span[0])


@pytest.mark.parametrize("method", ["random", "head", "deviation", "query"])
def test_with_everything_recomputed_parts_are_full_prefill(engine: Engine, method: str) -> None:
    engine.precompute([CHUNK, OTHER])
    prompt = behind(12, Part(CHUNK, 5, 38), Text((8, 9)), Part(OTHER, 2, 25))
    full = engine.prefill(prompt, Plan("full")).logits
    found = engine.prefill(prompt, Plan(method, ratio=1.0))
    assert found.report.selected == found.report.cached == 33 + 23
    assert float((found.logits - full).abs().max()) <= 1e-4 * max(1.0, float(full.abs().max()))


def test_a_part_is_exact_only_where_it_begins_the_chunk_behind_the_sink(engine: Engine) -> None:
    engine.precompute([CHUNK])
    for part, cached in ((Part(CHUNK, 0, 33), 33), (Part(CHUNK, 1, 33), 0)):
        prompt = behind(1, part)
        found = engine.prefill(prompt, Plan("prefix"))
        assert found.report.cached == cached
        full = engine.prefill(prompt, Plan("full")).logits
        torch.testing.assert_close(found.logits, full, rtol=1e-4, atol=1e-4)
    assert engine.prefill(behind(1, Part(CHUNK, 1, 33)), Plan("head", ratio=0.5)).report.selected == 16


def test_a_part_whose_chunk_is_not_stored_is_computed_and_the_chunk_encoded_whole(model: Path, tmp_path: Path) -> None:
    prompt = behind(6, Part(CHUNK, 2, 37))
    with tiny.engine(model, tmp_path, recompute_misses=True) as engine:
        found = engine.prefill(prompt, Plan("reuse"))
        assert [chunk.outcome for chunk in found.report.chunks] == ["miss"]
        torch.testing.assert_close(found.logits, engine.prefill(prompt, Plan("full")).logits, rtol=1e-4, atol=1e-4)
        assert engine.wait_idle(60)
        assert engine.missing([CHUNK]) == []
        again = engine.prefill(prompt, Plan("reuse"))
        assert [chunk.outcome for chunk in again.report.chunks] == ["hit"]
        torch.testing.assert_close(again.logits, by_hand(engine, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("span", [(-1, 3), (3, 3), (4, 3), (0, 41), (True, 3), (0, 2.0)], ids=str)
def test_a_part_has_tokens_of_its_chunk(span: tuple[int, int]) -> None:
    with pytest.raises(InvalidPrompt, match="first < end <= 40"):
        Part(CHUNK, *span)
    with pytest.raises(InvalidPrompt, match="a Chunk"):
        Part(QUESTION, 0, 1)  # type: ignore[arg-type]


def test_a_prompt_tells_its_parts() -> None:
    part = Part(CHUNK, 2, 5)
    prompt = Prompt([Text((1, 2)), part, Text((3,)), OTHER])
    assert len(prompt) == 2 + 3 + 1 + 25
    assert prompt.token_ids == (1, 2, *CHUNK.token_ids[2:5], 3, *OTHER.token_ids)
    assert list(prompt.parts()) == [(2, part), (6, Part(OTHER, 0, 25))]

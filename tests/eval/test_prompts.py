"""Prompts of a data set: a passage is a chunk, and what the model has no room for is dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blend import Chunk, Engine, Text
from blend.errors import InvalidInput
from blend.eval.prompts import build_prompt, digest, prepare
from tests import tiny
from tests.eval import samples


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("prompts")
    with tiny.engine(tiny.save_model(directory / "model"), directory / "store") as made:
        yield made


def test_each_passage_is_a_chunk_and_the_question_ends_the_prompt(engine: Engine) -> None:
    prompt = build_prompt(engine, samples.example())
    assert [type(s) for s in prompt.segments] == [Text, Chunk, Chunk, Chunk, Text]
    assert "what 0?" in engine.tokenizer.decode(prompt.segments[-1].token_ids)


def test_what_is_too_long_is_dropped_with_its_answers_room_and_never_cut(engine: Engine) -> None:
    examples = [samples.example(0), samples.example(1, passages=12), samples.example(2)]
    whole = prepare(engine, examples, max_new_tokens=4)
    assert [one.example.id for one in whole.asked] == ["q0", "q2"]
    assert whole.dropped == {"longer than the model": 1}
    assert whole.asked[0].prompt == build_prompt(engine, examples[0])
    length = len(whole.asked[0].prompt)
    room = engine.decoder.max_positions - length
    assert len(prepare(engine, examples[:1], max_new_tokens=room).asked) == 1
    with pytest.raises(InvalidInput, match="1 longer than the model"):
        prepare(engine, examples[:1], max_new_tokens=room + 1)


def test_the_digest_tells_prompts_and_their_order(engine: Engine) -> None:
    prompts = [build_prompt(engine, samples.example(i)) for i in range(2)]
    assert digest(prompts) == digest(list(prompts))
    assert len({digest(prompts), digest(prompts[::-1]), digest(prompts[:1])}) == 3

"""What shards of one model agree on, seen by one whose others are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Chunk, Engine, Plan, Prompt, filling
from blend.model.shards import Shards
from tests import tiny
from tests.test_encoding import given


class Others(Shards):
    """Two shards: the other one adds ``scores``, and lacks what ``lacks`` says of a meeting's number and its flags."""

    size = 2

    def __init__(self) -> None:
        self.scores: torch.Tensor | None = None
        self.lacks: Callable[[int, Sequence[bool]], Sequence[int]] = lambda meeting, flags: ()
        self.meetings = 0

    def total(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.scores is None else scores + self.scores

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        self.meetings += 1
        lacking = self.lacks(self.meetings, flags)
        return [flag and index not in lacking for index, flag in enumerate(flags)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    with tiny.engine(model, tmp_path) as made:
        yield made


@pytest.fixture
def others(engine: Engine) -> Others:
    engine.decoder.shards = others = Others()
    return others


@pytest.fixture
def prompt() -> Prompt:
    return tiny.prompt()


@pytest.mark.parametrize("method", ["deviation", "query"])
def test_tokens_are_chosen_by_the_scores_of_all(engine: Engine, others: Others, prompt: Prompt, method: str) -> None:
    engine.precompute(tiny.chunks_of(prompt))
    plan = Plan(method, ratio=0.3)
    alone = engine.prefill(prompt, plan, positions=True).report.recomputed_positions
    favourites = list(range(70, 75))
    others.scores = torch.zeros(len(prompt)).index_fill(0, torch.tensor(favourites), 1e6)
    together = engine.prefill(prompt, plan, positions=True).report.recomputed_positions
    assert alone is not None and together is not None
    assert len(together) == len(alone)
    assert not set(favourites) <= set(alone)
    assert set(favourites) <= set(together)


@pytest.fixture
def passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward pass of the engine has had since."""
    found: list[int] = []
    forward = engine.decoder.forward

    def counted(rows: Any, **options: Any) -> Any:
        found.append(len(rows[0]))
        return forward(rows, **options)

    monkeypatch.setattr(engine.decoder, "forward", counted)
    return found


def test_a_chunk_that_one_lacks_is_a_miss_for_all(engine: Engine, others: Others, prompt: Prompt) -> None:
    first, second, third = tiny.chunks_of(prompt)
    engine.precompute([first, third])
    want = engine.prefill(prompt, Plan("query", ratio=0.3))
    engine.precompute([second])
    before = others.meetings
    others.lacks = lambda meeting, flags: [1] if meeting == before + 1 else []
    got = engine.prefill(prompt, Plan("query", ratio=0.3))
    assert [chunk.outcome for chunk in got.report.chunks] == ["hit", "miss", "hit"]
    assert "another shard" in got.report.chunks[1].reason
    assert got.report.cached == want.report.cached
    assert torch.equal(got.logits, want.logits)


def test_a_chunk_that_one_loses_is_lost_for_all(engine: Engine, others: Others, prompt: Prompt) -> None:
    first, second, third = tiny.chunks_of(prompt)
    engine.precompute([first, third])
    want = engine.prefill(prompt, Plan("query", ratio=0.3))
    engine.precompute([second])
    before = others.meetings
    # One meeting for what is there, then one for each layer: the other shard loses the second chunk's layer 1.
    others.lacks = lambda meeting, flags: [1] if meeting == before + 3 else []
    got = engine.prefill(prompt, Plan("query", ratio=0.3))
    assert [chunk.outcome for chunk in got.report.chunks] == ["hit", "failed", "hit"]
    assert "another shard" in got.report.chunks[1].reason
    assert torch.equal(got.logits, want.logits)


def test_a_chunk_that_is_lost_here_is_told_to_all(
    engine: Engine, others: Others, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.precompute(tiny.chunks_of(prompt))
    good, told = filling._Source.layer, list[list[bool]]()
    doomed = engine.content_key(tiny.chunks_of(prompt)[1])

    def layer(source: filling._Source, number: int) -> torch.Tensor:
        if source.wanted.content == doomed:
            raise filling.ChunkLost(source.wanted, "the cable was pulled")
        return good(source, number)

    def told_of(meeting: int, flags: Sequence[bool]) -> Sequence[int]:
        told.append(list(flags))
        return ()

    monkeypatch.setattr(filling._Source, "layer", layer)
    others.lacks = told_of
    got = engine.prefill(prompt, Plan("query", ratio=0.3))
    # Of each chunk whether it is there, and whether its sensitivity is; then of each whether its first layer is.
    assert told[:3] == [[True, True, True, False, False, False], [False, False, False], [True, False, True]]
    assert "cable" in got.report.chunks[1].reason


def test_a_chunk_that_one_lacks_is_encoded_again_by_all(engine: Engine, others: Others, prompt: Prompt) -> None:
    (chunk, *_) = tiny.chunks_of(prompt)
    engine.precompute([chunk])
    assert engine.store.wait_idle(30)
    encode = engine._chunks.encode
    assert encode(chunk, "default") == (None, False)
    others.lacks = lambda meeting, flags: [0]
    assert encode(chunk, "default") == (None, True)


def test_a_sensitivity_that_one_lacks_is_used_by_none(engine: Engine, others: Others, prompt: Prompt) -> None:
    first, second, third = tiny.chunks_of(prompt)
    engine.precompute([second, third], behind=[(first,), (first,)])
    others.lacks = lambda meeting, flags: [4] if len(flags) == 6 else []  # of what is there, the second's sensitivity
    found = given(engine, *prompt.segments)
    assert found is not None
    at, length = len(prompt.segments[0]) + len(first), len(second)
    own = found[:, at + length : at + length + len(third)]
    assert float(own.std()) > 0
    torch.testing.assert_close(found[:, at : at + length], own.mean(dim=1, keepdim=True).expand(-1, length))
    others.lacks = lambda meeting, flags: [4, 5] if len(flags) == 6 else []
    assert given(engine, *prompt.segments) is None


def test_a_plain_variant_that_one_lacks_is_computed_by_all(
    engine: Engine, others: Others, prompt: Prompt, passes: list[int]
) -> None:
    first, second, *_ = tiny.chunks_of(prompt)
    engine.precompute([second])
    assert engine.store.wait_idle(30)
    passes.clear()
    before = others.meetings
    others.lacks = lambda meeting, flags: [0] if meeting == before + 2 else []
    engine.precompute([second], behind=[(first,)])
    sink = len(engine.sink)
    assert passes == [sink + len(first) + len(second), sink + len(second)]


def test_all_encode_a_chunk_behind_every_context_in_one_order(
    engine: Engine, others: Others, passes: list[int]
) -> None:
    chunk, *near = (Chunk(tiny.random_ids(length, length)) for length in (40, 11, 26, 17))
    for lacking in (False, True):  # here nothing is stored; then all is, and the other shard lacks it
        others.lacks = lambda meeting, flags: [0] if lacking else []  # noqa: B023
        passes.clear()
        engine.precompute([chunk], behind=[near])
        assert [length - len(engine.sink) - len(chunk) for length in passes] == [26 + 17, 11, 0]
    assert engine.behind(chunk) == tuple(map(engine.content_key, near))


def test_one_alone_agrees_with_itself() -> None:
    shards, scores = Shards(), torch.rand(5)
    assert (shards.rank, shards.size) == (0, 1)
    assert torch.equal(shards.total(scores), scores)
    assert shards.everywhere([True, False]) == [True, False]
    assert shards.first(7) == 7

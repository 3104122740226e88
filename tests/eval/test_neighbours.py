"""Neighbours of passages: the nearest of the whole data set, in the order that chunks are encoded behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blend import Chunk
from blend.eval.datasets import Passage
from blend.eval.neighbours import behind, nearest
from blend.rag.chunking import render_chunk
from blend.rag.protocols import Vectors
from tests import tiny


class Angles:
    """Embeds a text by the number in it, as a point on a circle, and counts the texts."""

    digest = "angles"

    def __init__(self) -> None:
        self.texts = 0

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.texts += len(texts)
        angles = np.radians([float(text.split()[-1]) for text in texts])
        return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


def passage(degrees: int, title: str = "") -> Passage:
    return Passage(title, f"at {degrees}")


def text(degrees: int) -> str:
    return render_chunk("", f"at {degrees}")


def test_the_nearest_come_last_and_none_is_its_own() -> None:
    found = nearest(map(passage, (0, 10, 25, 90)), Angles(), 2)
    assert found == {
        text(0): (text(25), text(10)),
        text(10): (text(25), text(0)),
        text(25): (text(0), text(10)),
        text(90): (text(10), text(25)),
    }


def test_the_same_passage_counts_once_however_often_it_comes() -> None:
    angles = Angles()
    gold = Passage("", "at 0", gold=True)
    found = nearest([passage(0), passage(10), gold, passage(10)], angles, 3)
    assert found == {text(0): (text(10),), text(10): (text(0),)}
    assert angles.texts == 2
    titled = nearest([passage(0), passage(0, "Title"), passage(50)], Angles(), 1)
    assert titled[text(0)] == (render_chunk("Title", "at 0"),), "another chunk, for it has a title"


@pytest.mark.parametrize(("count", "of"), [(3, 1), (3, 2), (1, 5), (3, 1500)])
def test_there_are_as_many_as_asked_for_or_all_others(count: int, of: int) -> None:
    found = nearest((passage(n % 360, str(n)) for n in range(of)), Angles(), count)
    assert len(found) == of
    for own, others in found.items():
        assert len(set(others)) == len(others) == min(count, of - 1) and own not in others


def test_nothing_has_no_neighbours() -> None:
    assert nearest([], Angles(), 3) == {}


def test_chunks_have_their_neighbours_as_far_as_the_context_reaches(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model", max_position_embeddings=64), tmp_path / "store") as engine:
        far, near, own = "f" * 20, "n" * 30, "o" * 25
        found = behind(engine, {own: (far, near), far: ()})
        chunks = {letters: Chunk(engine.tokenize(letters)) for letters in (far, near, own)}
        assert found == {chunks[own]: (chunks[near],), chunks[far]: ()}, "the farthest has no room"
        (key,) = engine.precompute([chunks[own]], behind=[found[chunks[own]]])
        assert key == engine.content_key(chunks[own])

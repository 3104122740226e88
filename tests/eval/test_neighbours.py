"""Neighbours of passages: the nearest of the whole data set, in the order that chunks are encoded behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blend import Chunk
from blend.errors import PromptTooLong
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


def test_neighbours_that_are_too_long_are_left_out_whichever_come_together(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model", max_position_embeddings=64), tmp_path / "store") as engine:
        others = [letter * length for letter, length in (("a", 19), ("b", 20), ("c", 19), ("d", 4), ("e", 19))]
        own = "o" * 25
        assert engine.longest_neighbour(len(own)) == 19, "twice that, a chunk of 25 and the sink are 64"
        found = behind(engine, {own: others, others[0]: ()})
        chunks = {letters: Chunk(engine.tokenize(letters)) for letters in (*others, own)}
        kept = [chunks[letters] for letters in others if not letters.startswith("b")]
        assert found == {chunks[own]: tuple(kept), chunks[others[0]]: ()}
        engine.precompute([chunks[own]], behind=[found[chunks[own]]])
        assert engine.behind(chunks[own]) == tuple(map(engine.content_key, kept))
        with pytest.raises(PromptTooLong):
            engine.precompute([chunks[own]], behind=[[chunks[others[1]], chunks[others[0]]]])

"""Which passages of a data set each of its passages is encoded behind, where its conditioned variant is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from blend.engine import Engine
from blend.eval.datasets.questions import Passage
from blend.rag.chunking import render_chunk
from blend.rag.protocols import Embedder
from blend.types import Chunk

NEIGHBOURS = 6
"""Passages that each is encoded behind, unless said otherwise."""

_AT_ONCE = 1024  # passages held against all the others, so that memory grows with their number alone


def nearest(passages: Iterable[Passage], embedder: Embedder, count: int = NEIGHBOURS) -> dict[str, tuple[str, ...]]:
    """Return for each passage the ``count`` others that are nearest to it, the farthest first and the nearest last.

    Passages stand for their chunk's text, as :func:`blend.rag.chunking.render_chunk` gives it, each once; of a data set
    with fewer others, all of them. Their distance is that of the texts' vectors, as retrieval has it.

    Args:
        passages: of all examples; the same one may come again.
        embedder: makes the vectors; each text is embedded once.
        count: how many.

    Raises:
        ModelError: the embedding model cannot be used.
    """
    texts = list(dict.fromkeys(render_chunk(passage.title, passage.text) for passage in passages))
    if not texts:
        return {}
    vectors = embedder.embed([text.strip() for text in texts])
    found: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(texts), _AT_ONCE):
        alike = vectors[start : start + _AT_ONCE] @ vectors.T
        for row, scores in enumerate(alike, start):
            scores[row] = -np.inf
            best = np.argsort(-scores, kind="stable")[: min(count, len(texts) - 1)]
            found[texts[row]] = tuple(texts[other] for other in best[::-1])
    return found


def behind(engine: Engine, neighbours: Mapping[str, Sequence[str]]) -> dict[Chunk, tuple[Chunk, ...]]:
    """Return what :func:`nearest` does as chunks, for ``engine.precompute(chunks, behind=…)``.

    Neighbours that are longer than :meth:`blend.Engine.longest_neighbour` says are left out.
    """
    chunks = {text: Chunk(engine.tokenize(text)) for text in {*neighbours, *sum(map(tuple, neighbours.values()), ())}}
    found: dict[Chunk, tuple[Chunk, ...]] = {}
    for text, others in neighbours.items():
        longest = engine.longest_neighbour(len(chunks[text]))
        found[chunks[text]] = tuple(chunks[other] for other in others if len(chunks[other]) <= longest)
    return found

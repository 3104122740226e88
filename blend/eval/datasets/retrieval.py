"""Passages for questions that come with their own paragraph alone, retrieved as the service retrieves them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from blend.eval.datasets.questions import Example, Passage
from blend.rag.chunking import render_chunk
from blend.rag.embedding import Embedder
from blend.rag.index import Index
from blend.rag.protocols import Embedder as EmbedderLike


class Retriever(Protocol):
    """Finds texts near to questions; :class:`EmbeddingRetriever` is one."""

    def nearest(self, texts: Sequence[str], questions: Sequence[str], k: int) -> Sequence[Sequence[int]]:
        """For each question, the places in ``texts`` of the ``k`` nearest (all, if there are fewer), best first."""
        ...


class EmbeddingRetriever:
    """Retrieves by the project's own embedding model and index.

    Args:
        embedder: the embedding model; by default the packaged one.
    """

    def __init__(self, embedder: EmbedderLike | None = None) -> None:
        self._embedder = embedder or Embedder()

    def nearest(self, texts: Sequence[str], questions: Sequence[str], k: int) -> list[list[int]]:
        """See :meth:`Retriever.nearest`. Every text is embedded once.

        Raises:
            ModelError: the embedding model cannot be used.
        """
        with tempfile.TemporaryDirectory() as directory:  # where a snapshot would be; none is saved
            index = Index(Path(directory) / "index", "evaluation")
            index.add(np.arange(len(texts), dtype=np.int64), self._embedder.embed(texts))
            found = [[row for row, _ in index.search(v, k)] for v in self._embedder.embed(questions)]
            index.close()
        return found


def fill(
    examples: Sequence[Example], corpus: Sequence[Passage], passages: int, seed: int, retriever: Retriever
) -> list[Example]:
    """Return the examples with passages of the corpus beside their own, which are kept whatever was retrieved.

    Args:
        examples: questions with their gold passages.
        corpus: distinct passages, the examples' own among them.
        passages: how many a question has in the end; fewer, if the corpus has fewer.
        seed: of the order of a question's passages.
        retriever: finds the corpus's passages near to a question.
    """
    texts = [render_chunk(p.title, p.text).strip() for p in corpus]
    nearest = retriever.nearest(texts, [e.question for e in examples], passages)
    filled = []
    for example, places in zip(examples, nearest, strict=True):
        own = {(p.title, p.text) for p in example.passages}
        others = [corpus[i] for i in places if (corpus[i].title, corpus[i].text) not in own]
        chosen = [*example.passages, *others[: max(0, passages - len(own))]]
        random.Random(f"{seed}/{example.id}").shuffle(chosen)
        filled.append(replace(example, passages=tuple(chosen)))
    return filled

"""Small files, and a retriever without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from blend.eval.datasets import EmbeddingRetriever
from tests.rag.words import WordEmbedder

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a value as JSON, or a list's items one a line for a name that ends in ``.jsonl``; returns the path."""

    def written(value: object, name: str = "data.json") -> str:
        path = tmp_path / name
        lines = value if name.endswith(".jsonl") and isinstance(value, list) else [value]
        path.write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
        return str(path)

    return written


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def words(embedder: WordEmbedder) -> EmbeddingRetriever:
    """Retrieves by common words, with the real index."""
    return EmbeddingRetriever(embedder)

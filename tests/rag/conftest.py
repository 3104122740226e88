"""Tokenizers and an embedding model that are fast enough for every test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from blend.config import RagConfig
from blend.model.tokenizer import Tokenizer
from blend.rag import Library
from tests.rag.words import WordEmbedder
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte, and control tokens ``<|pad|>``, ``<|start|>`` and ``<|end|>``."""
    return Tokenizer(byte_tokenizer(), name="tiny")


@pytest.fixture(scope="session")
def merging_tokenizer(default_model_dir: Path) -> Tokenizer:
    """The default model's tokenizer, in which token counts of parts do not add up."""
    return Tokenizer.from_directory(default_model_dir, "smollm2-135m")


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def open_library(tmp_path: Path, tokenizer: Tokenizer, embedder: WordEmbedder) -> Callable[..., Library]:
    """Opens a library in the test's directory, with other settings if asked for."""

    def opened(**settings: object) -> Library:
        arguments = {
            "directory": tmp_path / "library",
            "config": RagConfig(chunk_tokens=64, max_document_bytes=1 << 16),
            "tokenizer": tokenizer,
            "embedder": embedder,
            **settings,
        }
        return Library(**arguments)  # type: ignore[arg-type]

    return opened

"""An engine on a tiny Llama, and the one prompt that most tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blend import Engine, Prompt
from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama."""
    return tiny.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine on it, with an empty store."""
    with tiny.engine(model, tmp_path / "store") as made:
        yield made


@pytest.fixture
def prompt(engine: Engine) -> Prompt:
    """A prompt whose chunks are stored, in the namespace ``evaluation``."""
    made = tiny.prompt()
    engine.precompute(tiny.chunks_of(made), namespace="evaluation")
    return made

"""One saved tiny model per architecture, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blend import Engine
from tests import tiny


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a saved tiny model of an architecture, made once."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tiny.save_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get


@pytest.fixture(params=sorted(tiny.ARCHITECTURES))
def engine(request: pytest.FixtureRequest, model_of: Callable[[str], Path], tmp_path: Path) -> Iterator[Engine]:
    """An engine on each architecture in turn."""
    with tiny.engine(model_of(request.param), tmp_path / "store") as made:
        yield made


@pytest.fixture
def llama(model_of: Callable[[str], Path], tmp_path: Path) -> Iterator[Engine]:
    """An engine on the plain Llama."""
    with tiny.engine(model_of("llama"), tmp_path / "store") as made:
        yield made

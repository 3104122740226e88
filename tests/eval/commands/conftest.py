"""What tests of commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blend.eval import __main__ as command
from tests import tiny

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=2048)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command that has to succeed and returns its JSON document."""
    monkeypatch.setenv("BLEND_CACHE", str(tmp_path / "cache"))

    def run(*words: object, code: int = 0) -> Any:
        assert command.main([str(word) for word in words] + ["--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run

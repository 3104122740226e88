"""What every test shares: an offline, small-threaded environment and the default model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Libraries read these once, when they are imported, and conftest is imported before any test.
for _name, _value in {
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

IN_CI = os.environ.get("CI") == "true"

# No deadline, for a busy machine is no fault of the code; the same examples each time where nobody watches.
settings.register_profile("blend", deadline=None, derandomize=IN_CI)
settings.load_profile("blend")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Directory of the converted default model; where it cannot be had, a skip, but in CI a failure."""
    from blend.errors import ModelUnavailable
    from blend.model.source import resolve

    try:
        return resolve("smollm2-135m")
    except ModelUnavailable as error:
        if IN_CI:
            pytest.fail(f"CI needs the default model: {error}")
        pytest.skip(f"the default model is not available: {error}")


@pytest.fixture(scope="session")
def xquad() -> Path:
    """The English XQuAD file beside the checkout; where it is not, a skip with the reason, in CI a failure."""
    path = Path(__file__).parents[2] / "shared" / "data" / "xquad.en.dev.json"
    if not path.is_file():
        if IN_CI:
            pytest.fail("CI needs XQuAD beside the checkout")
        pytest.skip("XQuAD is not beside the checkout (shared/data/xquad.en.dev.json)")
    return path


@pytest.fixture
def interrupts_arrive() -> Iterator[None]:
    """A background job, and what it starts, would ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

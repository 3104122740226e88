"""Rows as runs of neighbouring positions."""

# ruff: noqa: E402 - nothing of vLLM is imported where it is not installed

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidInput
from tests.connector.conftest import require_vllm

require_vllm()

from blend.connector.vllm.pages import runs_of

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


@given(st.sets(st.integers(0, 60), min_size=1))
def test_runs_hold_every_position_once_and_touch_no_other_run(positions: set[int]) -> None:
    runs = runs_of(torch.tensor(sorted(positions)))
    assert [p for start, end in runs for p in range(start, end)] == sorted(positions)
    assert all(before[1] < after[0] for before, after in pairwise(runs))


def test_no_rows_are_no_runs_and_a_mistake() -> None:
    with pytest.raises(InvalidInput):
        runs_of(torch.tensor([], dtype=torch.int64))

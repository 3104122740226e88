"""Whatever a kernel's wrapper allocates holds NaN until it is written: what a kernel forgets to write is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))
    assert torch.empty(3).isnan().all()


def _filled(make: Any) -> Any:
    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        made: torch.Tensor = make(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() and made.numel() else made

    return filled

"""The kernels in plain torch against float64, over the cases that the Triton versions are checked with."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from blend.recompute.kernels import reference
from blend.recompute.kernels.dispatch import Kernels, kernels
from tests.recompute.kernels import assemble, attend, commit, deviation, mass
from tests.recompute.kernels.common import name_of

CPU = torch.device("cpu")


def over(module: ModuleType) -> Callable[[Any], Any]:
    """Every case of a kernel, in both versions."""

    def decorate(test: Any) -> Any:
        test = pytest.mark.parametrize("case", module.CASES, ids=name_of)(test)
        versions = [kernels(CPU, "torch"), kernels(CPU, "reference")]
        return pytest.mark.parametrize("version", versions, ids=lambda version: version.backend)(test)

    return decorate


@over(assemble)
def test_assemble(case: dict[str, Any], version: Kernels) -> None:
    assemble.check(case, version)


@over(attend)
def test_attend(case: dict[str, Any], version: Kernels) -> None:
    attend.check(case, version)


@over(commit)
def test_commit(case: dict[str, Any], version: Kernels) -> None:
    commit.check(case, version)


@over(deviation)
def test_deviation(case: dict[str, Any], version: Kernels) -> None:
    deviation.check(case, version)


@over(mass)
def test_mass(case: dict[str, Any], version: Kernels) -> None:
    mass.check(case, version)


def test_mass_ignores_what_lies_behind_the_rows() -> None:
    q, k = torch.randn(2, 3, 8), torch.randn(2, 20, 8)
    k[:, 15:] = 1e4
    got = reference.mass(q, k, torch.tensor([4, 9, 14]), scale=1.0)
    assert got[15:].eq(0).all()
    assert got.isfinite().all()


def test_deviation_of_a_tensor_from_itself_is_nothing() -> None:
    a = torch.randn(3, 63, 8)
    assert reference.deviation((a, a), (a, a)).eq(0).all()

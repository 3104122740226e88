"""The kernels in plain torch against float64, over the cases that the Triton versions are checked with."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from blend.recompute.kernels import reference
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels, kernels
from blend.recompute.kernels.memory import Canvases
from tests.recompute.kernels import assemble, attend, commit, deviation, mass, move
from tests.recompute.kernels.common import BOUNDS, ascending, name_of, rms

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


@over(move)
def test_move(case: dict[str, Any], version: Kernels) -> None:
    move.check(case, version)


@pytest.mark.parametrize("case", mass.CASES, ids=name_of)
def test_attention_with_mass_is_both(case: dict[str, Any]) -> None:
    version = kernels(CPU, "torch")
    assert version.attend_with_mass is not None
    g = torch.Generator().manual_seed(3)
    (kv_heads, group), (rows, length), dims = case["heads"], case["size"], case["dims"]
    positions = ascending(rows, length, g)
    query = torch.randn(rows, kv_heads * group, dims, generator=g).to(case["dtype"]).transpose(0, 1)
    key, value = torch.randn(2, kv_heads, length, dims, generator=g).to(case["dtype"])
    visible = torch.rand(length, generator=g) > 0.4 if case["hidden"] else None
    asked: dict[str, Any] = {"scale": dims**-0.5, "window": case["window"], "softcap": case["softcap"]}
    want = version.attend(query, Canvases([key[None]], [value[None]]), 0, Batch([positions], [visible]), **asked)
    for stored in (key, value):
        stored[:, int(positions[-1]) + 1 :] = torch.nan  # nobody has written there
    for counted in {0, rows // 3, rows - 1}:
        got, total = version.attend_with_mass(query, key, value, positions, counted, visible=visible, **asked)
        assert got.dtype == query.dtype and got.shape == query.shape
        assert got.transpose(0, 1).is_contiguous()
        assert rms(got, want.double()) < BOUNDS[case["dtype"]]
        alone = version.mass(query[:, counted:], key, positions[counted:], visible=visible, **asked)
        torch.testing.assert_close(total, alone)


def test_mass_ignores_what_lies_behind_the_rows() -> None:
    q, k = torch.randn(2, 3, 8), torch.randn(2, 20, 8)
    k[:, 15:] = 1e4
    got = reference.mass(q, k, torch.tensor([4, 9, 14]), scale=1.0)
    assert got[15:].eq(0).all()
    assert got.isfinite().all()


def test_deviation_of_a_tensor_from_itself_is_nothing() -> None:
    a = torch.randn(3, 63, 8)
    assert reference.deviation((a, a), (a, a)).eq(0).all()

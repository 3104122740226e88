"""The reference kernels against the plainest possible float64 computation, on odd sizes."""

from __future__ import annotations

import pytest
import torch

from blend.recompute.kernels import reference


def naive_mass(q, k, positions, scale, window, softcap, visible):  # type: ignore[no-untyped-def]
    q, k = q.double(), k.double()
    group = q.shape[0] // k.shape[0]
    total = torch.zeros(k.shape[1], dtype=torch.float64)
    for h in range(q.shape[0]):
        for i, p in enumerate(positions.tolist()):
            allowed = [
                j
                for j in range(p + 1)
                if (window is None or j > p - window) and (visible is None or bool(visible[j]) or j == p)
            ]
            s = (k[h // group][allowed] @ q[h, i]) * scale
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            total[allowed] += s.softmax(0)
    return total


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 211), (67, 211), (130, 300)])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3)])
@pytest.mark.parametrize(("window", "softcap", "hide"), [(None, None, False), (24, None, True), (None, 5.0, True)])
def test_mass(rows: int, length: int, kv_heads: int, group: int, window, softcap, hide: bool) -> None:  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(rows * length)
    q = torch.randn(kv_heads * group, rows, 16, generator=g)
    k = torch.randn(kv_heads, length, 16, generator=g)
    positions = torch.randperm(length, generator=g)[:rows].sort().values
    visible = torch.rand(length, generator=g) > 0.3 if hide else None
    got = reference.mass(q, k, positions, scale=0.25, window=window, softcap=softcap, visible=visible)
    want = naive_mass(q, k, positions, 0.25, window, softcap, visible)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert float(got.sum()) == pytest.approx(kv_heads * group * rows, rel=1e-4)


def test_mass_ignores_what_lies_behind_the_rows() -> None:
    q, k = torch.randn(2, 3, 8), torch.randn(2, 20, 8)
    k[:, 15:] = 1e4
    got = reference.mass(q, k, torch.tensor([4, 9, 14]), scale=1.0)
    assert got[15:].eq(0).all() and got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 63])
def test_deviation(dtype: torch.dtype, tokens: int) -> None:
    a, b = torch.randn(3, tokens, 8).to(dtype), torch.randn(3, tokens, 8).to(dtype)
    want = (a.double() - b.double()).pow(2).sum((0, 2))
    torch.testing.assert_close(reference.deviation(a, b).double(), want, rtol=1e-5, atol=1e-6)
    assert reference.deviation(a, a).eq(0).all()

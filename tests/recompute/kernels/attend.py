"""Attention against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels
from tests.recompute.kernels.common import (
    BOUNDS,
    DEVICE,
    DTYPES,
    HEAD_DIMS,
    HEADS,
    SIZES,
    ascending,
    attend64,
    cover,
    filled,
    name_of,
    rms,
    seen64,
    tiles_of,
    triton_kernels,
)

CASES = cover(
    {
        "dtype": DTYPES,
        "size": SIZES,
        "heads": HEADS,
        "dims": HEAD_DIMS,
        "paged": (False, True),
        "window": (None, 24, 300),
        "softcap": (None, 5.0),
        "hidden": (False, True),
        "requests": (1, 3),
        "processors": (1, 64),
    },
    lambda case: tiles_of(case, 128, 64) * case["requests"] <= 130,
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_attend(case: dict[str, Any]) -> None:
    check(case, triton_kernels())


def check(case: dict[str, Any], version: Kernels) -> None:
    """Refuse a version of the kernel that is wrong in this case."""
    g = torch.Generator().manual_seed(len(name_of(case)))
    kv_heads, group = case["heads"]
    rows, length = case["size"]
    sizes = [(rows, length), (1, max(1, length // 2)), (min(rows, 7), max(7, length // 3))][: case["requests"]]
    positions = [ascending(r, n, g) for r, n in sizes]
    lengths = [int(at[-1]) + 1 for at in positions]

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(heads, tokens, case["dims"], generator=g).to(DEVICE, case["dtype"])

    keys, values = ([random(kv_heads, n) for n in lengths] for _ in range(2))
    visible = [torch.rand(n, generator=g).to(DEVICE) > 0.4 if case["hidden"] else None for n in lengths]
    if case["requests"] > 1:
        visible[1] = None
    memory = filled(keys, values, paged=case["paged"], generator=g)
    batch = Batch(positions, visible, processors=case["processors"])
    # Rows first in memory, as a model's projection leaves them.
    query = random(batch.rows, kv_heads * group).transpose(0, 1)
    scale = case["dims"] ** -0.5
    options = {"window": case["window"], "softcap": case["softcap"]}
    got = version.attend(query, memory, 1, batch, scale=scale, **options)
    parts = []
    for i, (at, n) in enumerate(zip(positions, lengths, strict=True)):
        seen = seen64(at, n, case["window"], visible[i])
        own = query[:, batch.starts[i] : batch.starts[i + 1]]
        parts.append(attend64(own, keys[i], values[i], seen, scale, case["softcap"]))
    want = torch.cat(parts, 1)
    assert got.shape == query.shape
    assert got.dtype == query.dtype
    if version.backend == "triton":  # as the layer's output projection reads it
        assert got.transpose(0, 1).is_contiguous()
    assert rms(got, want) < BOUNDS[case["dtype"]]


def test_keys_that_a_row_may_not_read_change_no_bit_of_it() -> None:
    g = torch.Generator().manual_seed(1)
    at = torch.arange(3, 300, 7, device=DEVICE)
    query, k, v = (torch.randn(h, n, 64, generator=g).to(DEVICE) for h, n in ((4, len(at)), (2, 300), (2, 300)))
    before = triton_kernels().attend(query, filled([k], [v], paged=False, generator=g), 1, Batch([at]), scale=0.1)
    cut = 20
    k[:, at[cut] + 1 :] = 1e4
    v[:, at[cut] + 1 :] = -1e4
    after = triton_kernels().attend(query, filled([k], [v], paged=False, generator=g), 1, Batch([at]), scale=0.1)
    assert torch.equal(before[:, : cut + 1], after[:, : cut + 1])
    assert not torch.equal(before, after)

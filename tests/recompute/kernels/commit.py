"""Writing fresh rows: every bit where it belongs, nothing else touched, and the deviation on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.memory import Memory
from tests.recompute.kernels.common import (
    DEVICE,
    DTYPES,
    HEAD_DIMS,
    ascending,
    cover,
    filled,
    name_of,
    rms,
    triton_kernels,
)

CASES = cover(
    {
        "dtype": DTYPES,
        "size": ((1, 1), (1, 211), (63, 211), (63, 1000), (500, 1000)),
        "heads": (1, 3, 8),
        "dims": HEAD_DIMS,
        "paged": (False, True),
        "requests": (1, 3),
        "score": (None, "key", "value", "both"),
        "strided": (False, True),
    },
    lambda case: case["size"][0] * case["heads"] * case["dims"] <= 300_000,
)


def contents(memory: Memory) -> list[torch.Tensor]:
    """All its bits."""
    return [tensor.clone().view(torch.uint8) for tensor in (*memory.keys, *memory.values)]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_commit(case: dict[str, Any]) -> None:
    check(case, triton_kernels())


def check(case: dict[str, Any], version: Kernels) -> None:
    """Refuse a version of the kernel that is wrong in this case."""
    g = torch.Generator().manual_seed(len(name_of(case)))
    heads, dims = case["heads"], case["dims"]
    rows, length = case["size"]
    sizes = [(rows, length), (1, max(1, length // 2)), (min(rows, 7), max(7, length // 3))][: case["requests"]]
    positions = [ascending(r, n, g) for r, n in sizes]

    def random(tokens: int) -> torch.Tensor:
        if case["strided"]:
            return torch.randn(tokens, heads, dims, generator=g).to(DEVICE, case["dtype"]).transpose(0, 1)
        return torch.randn(heads, tokens, dims, generator=g).to(DEVICE, case["dtype"])

    old = [[random(n) for _, n in sizes] for _ in range(2)]
    memory = filled(*old, paged=case["paged"], generator=g)
    batch = Batch(positions)
    key, value = random(batch.rows), random(batch.rows)
    distance = []
    for request, at in enumerate(positions):
        own = slice(batch.starts[request], batch.starts[request + 1])
        compared = {"key": "k", "value": "v", "both": "kv", None: ""}[case["score"]]
        distance.append(
            sum(
                (new[:, own].double() - before[request][:, at].double()).square().sum((0, 2))
                for which, new, before in (("k", key, old[0]), ("v", value, old[1]))
                if which in compared
            )
        )
    untouched = contents(memory)
    got = version.commit(key, value, memory, 1, batch, score=case["score"])
    for request, at in enumerate(positions):
        own = slice(batch.starts[request], batch.starts[request + 1])
        for found, new, before in zip(memory.views(request, 1, sizes[request][1]), (key, value), old, strict=True):
            want = before[request].clone()
            want[:, at] = new[:, own]
            assert torch.equal(found, want)
    changed = sum(int((a != b).sum()) for a, b in zip(contents(memory), untouched, strict=True))
    assert 0 < changed <= 2 * key.nbytes
    if case["score"] is None:
        assert got is None
    else:
        assert got is not None
        assert rms(got, torch.cat(distance)) < 1e-6  # type: ignore[arg-type]

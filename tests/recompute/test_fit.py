"""Which GPUs the Triton kernels fit, and which tiles they take there. None is needed here."""

from __future__ import annotations

import pytest
import torch

from blend.recompute.kernels.fit import large, shape, unfit

KIB = 1024
GPUS = {
    (8, 0): 163,  # A100
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,  # H100, H200
    (10, 0): 227,  # B200
    (10, 3): 227,
    (12, 0): 99,  # RTX 50
    (12, 1): 99,
}
"""Compute capability → KiB of shared memory that one block may have (CUDA programming guide, table of limits)."""


@pytest.mark.parametrize(("capability", "shared"), GPUS.items())
def test_every_gpu_since_ampere_fits(capability: tuple[int, int], shared: int) -> None:
    assert unfit(capability, shared * KIB) == ""


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_older_ones_do_not_and_are_told_why(capability: tuple[int, int]) -> None:
    assert unfit(capability, 227 * KIB) == f"compute capability {capability[0]}.{capability[1]}, and they need 8.0"


@pytest.mark.parametrize(("capability", "shared"), [((8, 6), 48), ((9, 0), 99), ((10, 0), 128), ((13, 0), 64)])
def test_one_with_too_little_shared_memory_does_not(capability: tuple[int, int], shared: int) -> None:
    assert f"{shared * KIB} bytes of shared memory" in unfit(capability, shared * KIB)


def test_only_gpus_with_room_for_them_take_large_tiles() -> None:
    assert {gpu for gpu in GPUS if large(10 * gpu[0] + gpu[1])} == {(9, 0), (10, 0), (10, 3)}
    many = {at: shape(128, torch.bfloat16, 1000, at) for at in (80, 90, 100, 120)}
    assert many[80] == many[120] != many[90] == many[100]
    tile = many[120]
    assert (tile.block_m + 2 * tile.stages * tile.block_n) * 128 * 2 <= 99 * KIB

"""What the Triton kernels need of a GPU: which tiles they take on it, and whether it has room for them.

Nothing of Triton is imported here, so that it can be asked on any machine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from blend.recompute.kernels.checks import padded

LEAST_CAPABILITY = (8, 0)
"""The first that multiplies bfloat16 matrices and copies to shared memory asynchronously (CUDA programming guide)."""

SMALL_TILES, LARGE_TILES = 72 * 1024, 132 * 1024
"""Bytes of shared memory that no kernel of a family of tiles exceeds: see ``benchmarks/kernels.py --compile``."""


class Shape(NamedTuple):
    """Pairs and keys of a tile, warps of a program, and stages of the pipeline that loads keys and values."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def large(architecture: int) -> bool:
    """Whether a GPU takes the large tiles: data-centre ones from Hopper on, with 227 KiB of shared memory a block.

    ``architecture`` is a compute capability, such as 90. From 120 on, GPUs have 99 KiB.
    """
    return 90 <= architecture < 120


def shape(head_dim: int, dtype: torch.dtype, pairs: int, architecture: int) -> Shape:
    """Attention's tile for ``pairs`` (row, head of group) pairs of the largest request: no registers spill."""
    wide = padded(head_dim)
    if dtype == torch.float32:
        return Shape(16, 32 if wide <= 128 else 16, 4 if wide <= 64 else 8, 1)
    if pairs <= 16:
        return Shape(16, 64 if wide <= 128 else 32, 4, 3 if wide == 128 else 2)
    if wide > 128:
        return Shape(64, 32, 8, 2)
    if pairs <= 64:
        return Shape(64, 64 if wide <= 64 and architecture < 120 else 32, 4, 3)
    if wide <= 64:
        return Shape(128, 64, 8, 3)
    return Shape(128, 64, 8, 3) if large(architecture) else Shape(128, 32, 8, 2)


def unfit(capability: tuple[int, int], shared: int) -> str:
    """Why the Triton kernels do not run on a GPU; empty where they do.

    Args:
        capability: its compute capability, major and minor.
        shared: bytes of shared memory that one of its thread blocks may have.
    """
    if capability < LEAST_CAPABILITY:
        return f"compute capability {_dotted(capability)}, and they need {_dotted(LEAST_CAPABILITY)}"
    needed = LARGE_TILES if large(10 * capability[0] + capability[1]) else SMALL_TILES
    if shared < needed:
        return f"{shared} bytes of shared memory a block, and they need {needed}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))

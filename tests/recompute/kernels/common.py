"""What the checks of the Triton kernels share: a cover of all pairs, and float64 versions that are plainly right."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blend.recompute.kernels.dispatch import Kernels, kernels
from blend.recompute.kernels.memory import Canvases, Memory, Pages

DEVICE = torch.device(os.environ.get("BLEND_KERNEL_DEVICE", "cpu"))
"""``cpu`` with Triton's interpreter, or ``cuda`` to check what the GPU computes."""

SIZES = ((1, 1), (1, 211), (63, 211), (1, 1000), (63, 1000), (500, 1000))
"""Rows and positions of the largest request."""
HEADS = ((1, 1), (4, 1), (32, 1), (1, 3), (4, 3), (1, 8), (4, 8))
"""KV heads, and heads that share one."""
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 7e-3}
"""Relative root-mean-square error of a result, by dtype: a little more than its rounding."""


def triton_kernels() -> Kernels:
    """The Triton version, whatever the device."""
    return kernels(DEVICE, "triton")


def cover(parameters: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Few cases such that every pair of values that an allowed case can hold is in one of them. Always the same."""
    rng = random.Random(7)
    waiting = [
        {a: x, b: y} for a, b in itertools.combinations(parameters, 2) for x in parameters[a] for y in parameters[b]
    ]
    cases: list[dict[str, Any]] = []
    while waiting:
        tries = [{name: rng.choice(values) for name, values in parameters.items()} | waiting[0] for _ in range(20)]
        tries = [case for case in tries if allowed(case)]
        if not tries:
            waiting.pop(0)
            continue
        best = max(tries, key=lambda case: sum(pair.items() <= case.items() for pair in waiting))
        cases.append(best)
        waiting = [pair for pair in waiting if not pair.items() <= best.items()]
    return cases


def tiles_of(case: Mapping[str, Any], block_m: int, block_n: int) -> int:
    """How many tiles attention computes, at most: what a case costs in the interpreter."""
    (rows, length), (kv_heads, group) = case["size"], case["heads"]
    if case["dtype"] == torch.float32:
        block_m, block_n = 32, 32
    return kv_heads * -(-rows * group // block_m) * -(-length // block_n)


def name_of(case: Mapping[str, Any]) -> str:
    """A case as a test id."""
    return "-".join(f"{name}={str(value).removeprefix('torch.')}".replace(" ", "") for name, value in case.items())


def rms(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of ``want``. Anything that is not finite makes it infinite."""
    if not got.isfinite().all():
        return float("inf")
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-30))


def seen64(positions: Tensor, length: int, window: int | None, visible: Tensor | None) -> Tensor:
    """``[R, length]`` bool, row by row: what it may read."""
    seen = torch.zeros(len(positions), length, dtype=torch.bool)
    for row, at in enumerate(positions.tolist()):
        seen[row, max(0, at - window + 1) if window else 0 : at + 1] = True
        if visible is not None:
            seen[row] &= visible[:length].cpu()
            seen[row, at] = True
    return seen.to(positions.device)


def shares64(query: Tensor, key: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    """``[H, R, N]`` float64: the softmax over what each row may read."""
    repeated = key.double().repeat_interleave(len(query) // len(key), 0)
    scores = query.double() @ repeated.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def attend64(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    """``[H, R, D]`` float64."""
    shares = shares64(query, key, seen, scale, softcap)
    return shares @ value.double().repeat_interleave(len(query) // len(key), 0)


def ascending(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """``rows`` different positions below ``length``, the last of them the last one if there are several."""
    at = torch.randperm(length, generator=generator)[:rows].sort().values
    if rows > 1:
        at[-1] = length - 1
    return at.to(DEVICE)


def filled(keys: Sequence[Tensor], values: Sequence[Tensor], *, paged: bool, generator: torch.Generator) -> Memory:
    """A memory of two layers whose layer 1 holds these ``[KVH, N_i, D]``, NaN everywhere else.

    Pages lie in any order, in a pool with room to spare.
    """
    first = keys[0]
    heads, _, dims = first.shape
    if not paged:
        canvases = []
        for part in (keys, values):
            made = [torch.full((2, heads, p.shape[1] + 5, dims), torch.nan, dtype=p.dtype, device=DEVICE) for p in part]
            for canvas, p in zip(made, part, strict=True):
                canvas[1, :, : p.shape[1]] = p
            canvases.append(made)
        return Canvases(*canvases)
    page = 16
    counts = [-(-p.shape[1] // page) for p in keys]
    blocks = sum(counts) + 3
    # [2, blocks, page, KVH, D], as vLLM has it; layer 0 and layer 1 are pools of their own.
    pools = [torch.full((2, blocks, page, heads, dims), torch.nan, dtype=first.dtype, device=DEVICE) for _ in range(2)]
    order = torch.randperm(blocks, generator=generator).tolist()
    table = torch.zeros(len(keys), max(counts) + 1, dtype=torch.int32, device=DEVICE)
    for request, (k, v) in enumerate(zip(keys, values, strict=True)):
        for index in range(counts[request]):
            block = table[request, index] = order.pop()
            for pool, part in zip(pools[1], (k, v), strict=True):
                span = part[:, index * page : (index + 1) * page].transpose(0, 1)
                pool[block, : len(span)] = span
    return Pages([pool[0] for pool in pools], [pool[1] for pool in pools], table)

"""The Triton kernels: compiled for GPUs that need not be there, or timed against this GPU's limits.

    python benchmarks/kernels.py --compile     # needs no GPU; minutes
    python benchmarks/kernels.py               # needs one; without it says so and ends

``--compile`` lets every wrapper launch its kernels on small tensors, collects the launches instead of running them,
and builds each for sm_80, sm_90, sm_100 and sm_120 with the assembler that comes with Triton: every tile that a
wrapper chooses at every head dimension, in 16 and 32 bits, on every architecture, and over these a cover of all pairs
of the other properties (kernel_cases.py). It reports registers, shared memory and spills as the assembler states them.
Without it each kernel is timed on shapes of an 8B model at 32K tokens, against the copy bandwidth or the matrix rate
that the same run measures. Prints a table, then one JSON line.

Exit status of --compile: 0 if all is well; 1 if anything does not build, spills, or needs more shared memory than
that GPU has, each named on stderr; 2 without Triton; 130 if interrupted, after a report of what was built by then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

import torch
from kernel_builds import SHARED_LIMIT, compile_all
from kernel_cases import KERNELS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from blend import versions
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import kernels
from blend.recompute.kernels.memory import Canvases
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Rotation

ARCHITECTURES = (80, 90, 100, 120)


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of a kernel, and the share of this GPU's measured limit that it reaches."""

    kernel: str
    what: str
    ms: float
    rate: float
    share: float
    limit: str


def seconds(call: Callable[[], object], tries: int = 20) -> float:
    """Median seconds of ``call`` on the GPU, caches as the call before left them."""
    for _ in range(3):
        call()
    times = []
    for _ in range(tries):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Floating-point operations a second of a large bfloat16 product."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / seconds(lambda: a @ a)


def measure(length: int = 32768, ratio: float = 0.15) -> list[Timing]:
    """Time every kernel on one layer of an 8B model (32 heads, 8 KV heads, D = 128, bfloat16), of ``length`` tokens.

    A floor in bytes counts each input read once and each output written once; that of attention counts the products
    of the pairs of row and key that are read.
    """
    device = torch.device("cuda")
    heads, kv_heads, dims, dtype = 32, 8, 128, torch.bfloat16
    bandwidth, matrices = copy_bandwidth(), matrix_rate()
    version = kernels(device, "triton")
    numbers = torch.randn(2, 1, kv_heads, length, dims, device=device, dtype=dtype)
    memory = Canvases([numbers[0]], [numbers[1]])
    key, value = numbers[0, 0], numbers[1, 0]
    rows = torch.randperm(length, generator=torch.Generator().manual_seed(1))[: int(length * ratio)].sort().values
    batch = Batch([rows.to(device)])
    query = torch.randn(len(rows), heads, dims, device=device, dtype=dtype).transpose(0, 1)
    fresh = torch.randn(2, kv_heads, len(rows), dims, device=device, dtype=dtype)
    whole = torch.randn(2, kv_heads, length, dims, device=device, dtype=dtype)
    question = torch.arange(length - 64, length, device=device)
    found = []

    def by_bytes(kernel: str, what: str, size: int, call: Callable[[], object]) -> None:
        taken = seconds(call)
        found.append(Timing(kernel, what, taken * 1e3, size / taken, size / taken / bandwidth, "copy bandwidth"))

    turns = Turns.of(Rotation(5e5 ** -(torch.arange(64) / 64), "half"), [i * 512 for i in range(length // 512)], device)
    slots = torch.arange(length, device=device)
    for kind in (dtype, torch.float8_e4m3fn, torch.int8):
        chunks = [torch.zeros(1, 2, kv_heads, 512, dims, device=device).to(kind) for _ in range(length // 512)]
        scales = None if kind == dtype else [torch.ones(1, 2, kv_heads, 512, device=device) for _ in chunks]
        stored = Stored(chunks, scales)
        size = numbers.nbytes + sum(c.nbytes for c in chunks) + sum(s.nbytes for s in scales or ())
        by_bytes(
            "assemble", f"{length} tokens from {kind}", size,
            lambda stored=stored: version.assemble(stored, 0, key, value, slots, turns),
        )  # fmt: skip
    by_bytes("commit", f"{len(rows)} rows", 2 * fresh.nbytes, lambda: version.commit(*fresh, memory, 0, batch))
    by_bytes(
        "commit",
        f"{len(rows)} rows, score",
        3 * fresh.nbytes,
        lambda: version.commit(*fresh, memory, 0, batch, score="both"),
    )
    by_bytes("deviation", "values", 2 * value.nbytes, lambda: version.deviation(whole[1], value))
    places = Turns.of(Rotation(5e5 ** -(torch.arange(64) / 64), "half"), range(length), device)
    spans = Spans(tuple((at, at + 512) for at in range(0, length, 512)), torch.ones(length, device=device))
    mean = torch.zeros(kv_heads, len(spans), dims, device=device)
    size = 2 * key.nbytes + places.cos.nbytes + places.sin.nbytes
    by_bytes("move", f"{length} tokens", size, lambda: version.move(key, mean, spans, places))
    few = question[-4:]
    for own in (few, question):
        asked = query[:, : len(own)]
        by_bytes(
            "mass",
            f"{len(own)} rows",
            2 * key.nbytes,
            lambda own=own, asked=asked: version.mass(asked, key, own, scale=0.1),
        )
    one = Batch([question[-1:]])
    by_bytes("attend", "1 row", 2 * key.nbytes, lambda: version.attend(query[:, :1], memory, 0, one, scale=0.1))
    flops = 4 * heads * dims * int((rows + 1).sum())
    taken = seconds(lambda: version.attend(query, memory, 0, batch, scale=0.1))
    found.append(
        Timing("attend", f"{len(rows)} rows", taken * 1e3, flops / taken, flops / taken / matrices, "matrix rate")
    )
    dense = dense_attention(heads, key, value)
    flops = 2 * heads * dims * length * length
    found.append(Timing("SDPA", f"{length} rows", dense * 1e3, flops / dense, flops / dense / matrices, "matrix rate"))
    return found


def dense_attention(heads: int, key: Tensor, value: Tensor) -> float:
    """Seconds of torch's own causal attention (FlashAttention) at every position."""
    query = torch.randn(heads, *key.shape[1:], device=key.device, dtype=key.dtype)
    wide_key, wide_value = (part.repeat_interleave(heads // len(part), 0) for part in (key, value))
    attention = torch.nn.functional.scaled_dot_product_attention
    return seconds(lambda: attention(query[None], wide_key[None], wide_value[None], is_causal=True))


def show(timings: list[Timing], console: Console) -> None:
    """A table of ``timings``."""
    table = Table("kernel", "on", "ms", "rate", "of limit", "limit")
    for t in timings:
        unit = "GB/s" if t.limit == "copy bandwidth" else "GFLOP/s"
        table.add_row(t.kernel, t.what, f"{t.ms:.3f}", f"{t.rate / 1e9:,.0f} {unit}", f"{t.share:.2f}", t.limit)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json-only", action="store_true", help="print the JSON line and what is wrong, nothing else")
    building = parser.add_argument_group("building without a GPU")
    building.add_argument("--compile", action="store_true", help="build instead of timing")
    building.add_argument(
        "--arch", type=int, nargs="+", choices=tuple(SHARED_LIMIT), default=ARCHITECTURES, metavar="SM",
        help=f"what to build for, of {', '.join(map(str, SHARED_LIMIT))} (default: {_listed(ARCHITECTURES)})",
    )  # fmt: skip
    building.add_argument(
        "--kernel", nargs="+", choices=KERNELS, default=KERNELS, metavar="NAME",
        help=f"what to build, of {', '.join(KERNELS)} (default: all)",
    )  # fmt: skip
    building.add_argument(
        "--jobs", type=_positive, default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes that build (default: one a CPU, here %(default)s)",
    )  # fmt: skip
    given = parser.parse_args()
    console = Console(width=160)
    if find_spec("triton") is None:
        print("Triton is not installed: pip install 'blendkv[gpu]'", file=sys.stderr)
        return 2
    if given.compile:
        return compile_all(given.arch, given.kernel, given.jobs, console, quiet=given.json_only)
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing is timed. --compile builds the kernels without one.", file=sys.stderr)
        return 0
    timings = measure()
    if not given.json_only:
        show(timings, console)
    found = {"gpu": torch.cuda.get_device_name(), "timings": [vars(t) for t in timings]}
    print(json.dumps({"benchmark": "kernels", **found, "environment": versions.as_json()}))
    return 0


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())

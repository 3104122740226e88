"""The Triton kernels: compiled for GPUs that need not be there, or timed against this GPU's limits.

    python benchmarks/kernels.py --compile     # needs no GPU
    python benchmarks/kernels.py               # needs one; without it says so and ends

``--compile`` lets every wrapper launch its kernels on small tensors, collects the launches instead of running them,
and builds each for sm_80, sm_90 and sm_100 with the assembler that comes with Triton. It reports registers, shared
memory and spills as the assembler states them, and fails if anything does not build, spills, or needs more shared
memory than that GPU has. Without it each kernel is timed on shapes of an 8B model at 32K tokens, against the copy
bandwidth or the matrix rate that the same run measures. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels, kernels
from blend.recompute.kernels.launch import Launch, collected
from blend.recompute.kernels.memory import Canvases, Pages
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Rotation

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program may have, by architecture (CUDA programming guide, table of limits)."""
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A call of one wrapper with small tensors, whose launches are to be compiled."""

    kernel: str
    what: str
    call: Callable[[Kernels], object]


def cases() -> list[Case]:
    """Every kernel with every shipped configuration."""
    made: list[Case] = []
    for dims in HEAD_DIMS:
        for dtype in DTYPES:
            name = f"{str(dtype).removeprefix('torch.')} D={dims}"
            made += [_attend_case(name, dims, dtype, rows, plain=True) for rows in (1, 16, 64)]
            if dtype == torch.bfloat16:
                made += [_attend_case(name, dims, dtype, rows, plain=False) for rows in (1, 16, 64)]
            made += [_mass_case(name, dims, dtype, plain) for plain in (True, False)]
            made += [_deviation_case(name, dims, dtype), *_commit_cases(name, dims, dtype)]
            made += _assemble_cases(name, dims, dtype)
    return made


def _memory(dims: int, dtype: torch.dtype, length: int, paged: bool) -> Canvases | Pages:
    if paged:
        pool = torch.zeros(2, length // 16, 16, 2, dims, dtype=dtype)
        return Pages([pool[0]], [pool[1]], torch.arange(length // 16)[None])
    plain = torch.zeros(2, 2, 2, length, dims, dtype=dtype)
    return Canvases([plain[0]], [plain[1]])


def _attend_case(name: str, dims: int, dtype: torch.dtype, rows: int, plain: bool) -> Case:
    """A few rows stand for decoding, with keys split; more for larger tiles, without."""
    positions = torch.arange(rows) * 15

    def call(version: Kernels) -> object:
        visible = None if plain else [torch.ones(1024, dtype=torch.bool)]
        batch = Batch([positions + 1023 - positions[-1]], visible, processors=64 if rows == 1 else 1)
        query = torch.zeros(rows, 8, dims, dtype=dtype).transpose(0, 1)
        options: dict[str, Any] = {} if plain else {"window": 512, "softcap": 50.0}
        return version.attend(query, _memory(dims, dtype, 1024, not plain), 0, batch, scale=0.1, **options)

    kind = "canvas" if plain else "pages, window, soft-cap, mask"
    return Case("attend", f"{name} rows={rows} {kind}", call)


def _mass_case(name: str, dims: int, dtype: torch.dtype, plain: bool) -> Case:
    def call(version: Kernels) -> object:
        query, key = torch.zeros(8, 32, dims, dtype=dtype), torch.zeros(2, 256, dims, dtype=dtype)
        options: dict[str, Any] = {"window": 64, "softcap": 50.0, "visible": torch.ones(256, dtype=torch.bool)}
        return version.mass(query, key, torch.arange(224, 256), scale=0.1, **({} if plain else options))

    return Case("mass", f"{name} {'plain' if plain else 'window, soft-cap, mask'}", call)


def _deviation_case(name: str, dims: int, dtype: torch.dtype) -> Case:
    def call(version: Kernels) -> object:
        fresh, cached = torch.zeros(2, 8, 64, dims, dtype=dtype), torch.zeros(2, 8, 256, dims, dtype=dtype)
        version.deviation(fresh[0], fresh[1])
        return version.deviation((fresh[0], fresh[1]), (cached[0], cached[1]), torch.arange(64))

    return Case("deviation", f"{name} one, and both at positions", call)


def _commit_cases(name: str, dims: int, dtype: torch.dtype) -> Iterator[Case]:
    for paged in (False, True):

        def call(version: Kernels, paged: bool = paged) -> object:
            fresh = torch.zeros(2, 2, 64, dims, dtype=dtype)
            batch = Batch([torch.arange(64)])
            memory = _memory(dims, dtype, 256, paged)
            version.commit(fresh[0], fresh[1], memory, 0, batch)
            return version.commit(fresh[0], fresh[1], memory, 0, batch, score="both")

        yield Case("commit", f"{name} {'pages' if paged else 'canvas'}, without score and with", call)


def _assemble_cases(name: str, dims: int, dtype: torch.dtype) -> Iterator[Case]:
    """Each stored dtype, with the turns of one pairing or the other, whole, partial or none."""
    kinds = [(dtype, 1.0, "half"), (dtype, 0.5, "interleaved"), (dtype, 0.0, "half")]
    if dtype == torch.bfloat16:
        kinds += [(torch.float8_e4m3fn, 1.0, "half"), (torch.int8, 1.0, "half"), (torch.int8, 0.25, "interleaved")]
    for stored, share, pairing in kinds:
        for paged in (False, True) if (stored, share) == (torch.bfloat16, 1.0) else (False,):

            def call(
                version: Kernels,
                stored: torch.dtype = stored,
                share: float = share,
                pairing: Any = pairing,
                paged: bool = paged,
            ) -> object:
                payload = torch.zeros(2, 2, 2, 64, dims).to(stored)
                scales = None if stored == dtype else [torch.ones(2, 2, 2, 64)]
                turns = None
                if share:
                    turns = Turns.of(Rotation(torch.ones(int(dims * share) // 2), pairing), [5], CPU)
                shape = (16, 16, 2, dims) if paged else (2, 256, dims)
                target = torch.zeros(2, *shape, dtype=dtype)
                version.assemble(Stored([payload], scales), 0, target[0], target[1], torch.arange(64), turns)
                return None

            what = f"{str(stored).removeprefix('torch.')} {pairing} {share:.0%} {'pages' if paged else 'canvas'}"
            yield Case("assemble", f"{name} from {what}", call)


@dataclass(frozen=True)
class Built:
    """What the assembler said of one kernel. ``failure`` is empty if it could be built."""

    case: int
    function: str
    architecture: int
    constants: str
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    failure: str = ""


def build(index: int, architecture: int) -> list[Built]:
    """Build what one case launches."""
    from triton.runtime.jit import JITFunction

    case = cases()[index]
    with collected(architecture) as launches:
        case.call(kernels(CPU, "triton"))
    found = []
    for item in launches:
        if not isinstance(item.kernel, JITFunction):
            raise TypeError("kernels are interpreted: unset TRITON_INTERPRET")
        constants = json.dumps(item.constants, sort_keys=True)
        try:
            registers, shared, spilled = _compile(item, architecture)
            found.append(Built(index, item.kernel.__name__, architecture, constants, registers, shared, spilled))
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is this kernel's result
            reason = f"{type(error).__name__}: {error}"
            found.append(Built(index, item.kernel.__name__, architecture, constants, failure=reason))
    return found


def _compile(item: Launch, architecture: int) -> tuple[int, int, int]:
    """Registers a thread, bytes of shared memory, and bytes spilled of one launch, specialized as at run time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(item.kernel.signature, item.kernel.params, backend)
    bound, specialization, options = bind(*item.arguments, **item.constants)
    options, signature, constants, attributes = item.kernel._pack_args(
        backend, dict(item.constants), bound, specialization, options
    )
    source = ASTSource(item.kernel, signature, constants, attributes)
    with redirect_stdout(StringIO()) as log:
        built = triton.compile(source, target=target, options=options.__dict__)
    said = log.getvalue()
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if registers is None or not spills:
        raise RuntimeError(f"the assembler did not say what it used: {said!r}")
    if built.metadata.shared > SHARED_LIMIT[architecture]:
        raise RuntimeError(f"{built.metadata.shared} bytes of shared memory; there are {SHARED_LIMIT[architecture]}")
    return int(registers[1]), built.metadata.shared, sum(map(int, spills))


def compile_all(console: Console, pattern: str, workers: int) -> int:
    """Build all cases whose name holds ``pattern`` for all architectures; returns the exit status."""
    start = time.perf_counter()
    listed = cases()
    tasks = [(i, a) for i, c in enumerate(listed) if pattern in f"{c.kernel} {c.what}" for a in ARCHITECTURES]
    results: list[Built] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            for done in as_completed([pool.submit(build, *task) for task in tasks]):
                results += done.result()
    results.sort(key=lambda r: (r.case, r.function, r.constants, r.architecture))
    table = Table("kernel", "case", "function", *(f"sm_{a}" for a in ARCHITECTURES))
    rows: dict[tuple[int, str, str], list[str]] = {}
    for r in results:
        cell = f"[red]{r.failure[:60]}" if r.failure else f"{r.registers} regs, {r.shared / 1024:.0f} KiB"
        cell += f"[red], {r.spilled} B spilled" if r.spilled else ""
        rows.setdefault((r.case, r.function, r.constants), []).append(cell)
    for (case, function, _), cells in rows.items():
        table.add_row(listed[case].kernel, listed[case].what, function, *cells)
    console.print(table)
    bad = [r for r in results if r.failure or r.spilled]
    for r in bad:
        console.print(f"[red]{listed[r.case].what} {r.function} sm_{r.architecture}: {r.failure or 'spills'}")
    summary = {
        "benchmark": "kernels --compile",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "triton": _version(),
        "built": len(results) - sum(1 for r in results if r.failure),
        "failed": sum(1 for r in results if r.failure),
        "spilling": sum(1 for r in results if r.spilled),
        "most_registers": {f"sm_{a}": _most(results, a, "registers") for a in ARCHITECTURES},
        "most_shared": {f"sm_{a}": _most(results, a, "shared") for a in ARCHITECTURES},
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(summary))
    return 1 if bad or not results else 0


def _most(results: list[Built], architecture: int, what: str) -> int:
    return max((getattr(r, what) for r in results if r.architecture == architecture), default=0)


def _version() -> str:
    import triton

    return str(triton.__version__)


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
    parser.add_argument("--compile", action="store_true", help="build for GPUs that need not be there")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases to build: those whose name holds TEXT")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that build")
    given = parser.parse_args()
    console = Console(width=160)
    if find_spec("triton") is None:
        print("Triton is not installed: pip install 'blendkv[gpu]'", file=sys.stderr)
        return 2
    if given.compile:
        return compile_all(console, given.only, given.workers)
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing is timed. --compile builds the kernels without one.")
        return 0
    timings = measure()
    show(timings, console)
    print(
        json.dumps({"benchmark": "kernels", "gpu": torch.cuda.get_device_name(), "timings": [vars(t) for t in timings]})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

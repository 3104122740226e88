"""Building Triton kernels for GPUs that need not be there, in several processes, and what the assembler says."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing import get_context
from typing import Any

import kernel_cases
from kernel_cases import Case
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from blend import versions
from blend.recompute.kernels.launch import Launch

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one program may have, by architecture (CUDA programming guide, table of limits)."""
TENSOR_LIMIT = 512
"""Columns of tensor memory that one program may have, where there is any."""
EACH = 20
"""Builds between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class Build:
    """One kernel to be built: the launch number ``index`` of ``case``."""

    case: Case
    index: int
    function: str

    @property
    def name(self) -> str:
        """All that tells it from others."""
        return f"{self.function} ({self.case.name})"


@dataclass(frozen=True)
class Result:
    """What the assembler said of a build: registers a thread, bytes of shared memory and of spills; or a failure.

    ``seconds`` of processor time went into it, those of the assembler among them.
    """

    build: Build
    registers: int = 0
    shared: int = 0
    tensor: int = 0
    spilled: int = 0
    failure: str = ""
    seconds: float = 0.0

    @property
    def fault(self) -> str:
        """Why this must not be shipped; empty if nothing is wrong."""
        limit = SHARED_LIMIT[self.build.case.architecture]
        if self.failure:
            return self.failure
        if self.spilled:
            return f"spills {self.spilled} bytes"
        if self.shared > limit:
            return f"needs {self.shared} bytes of shared memory where there are {limit}"
        if self.tensor > TENSOR_LIMIT:
            return f"needs {self.tensor} columns of tensor memory where there are {TENSOR_LIMIT}"
        return ""


def planned(cases: Sequence[Case]) -> list[Build]:
    """What the cases launch, each kernel once."""
    seen, found = set(), []
    for case in cases:
        for index, item in enumerate(case.launches()):
            source, options = _source(item, case.architecture)
            kind = (source.hash(), str(sorted(options.items(), key=lambda option: option[0])))
            if kind not in seen:
                seen.add(kind)
                found.append(Build(case, index, item.kernel.__name__))
    return found


def build(item: Build) -> Result:
    """Build it, in this process."""
    before = os.times()
    try:
        found = _built(item)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is this kernel's result
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outer ones say where, the innermost says what
            cause = cause.__cause__
        found = Result(item, failure=f"does not build: {type(cause).__name__}: {cause}")
    return replace(found, seconds=sum(os.times()[:4]) - sum(before[:4]))


def _built(item: Build) -> Result:
    import triton
    from triton.backends.compiler import GPUTarget

    architecture = item.case.architecture
    source, options = _source(item.case.launches()[item.index], architecture)
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(StringIO()) as log:
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        triton.knobs.compilation.disable_line_info = True  # takes time and changes nothing
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    said = log.getvalue()
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if registers is None or not spills:
        raise RuntimeError(f"the assembler did not say what it used: {said!r}")
    return Result(item, int(registers[1]), made.metadata.shared, made.metadata.tmem_size or 0, sum(map(int, spills)))


def _source(item: Launch, architecture: int) -> tuple[Any, dict[str, Any]]:
    """A launch as the compiler takes it, specialized as at run time, and the compiler's options."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", architecture, 32))
    bind = create_function_from_signature(item.kernel.signature, item.kernel.params, backend)
    bound, specialization, options = bind(*item.arguments, **item.constants)
    options, signature, constants, attributes = item.kernel._pack_args(
        backend, dict(item.constants), bound, specialization, options
    )
    return ASTSource(item.kernel, signature, constants, attributes), dict(options.__dict__)


def results(builds: Sequence[Build], jobs: int) -> Iterator[Result]:
    """Each build's result as it comes, built in ``jobs`` processes; ends early if the compiler takes a process down."""
    waiting, running = deque(builds), dict[Future[Result], Build]()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    with _uninterrupted():  # what is started here leaves interrupts to this process
                        running[pool.submit(build, waiting[0])] = waiting[0]
                    waiting.popleft()
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    item = running.pop(done)
                    try:
                        yield done.result()
                    except BrokenProcessPool:
                        waiting.clear()
                        yield Result(item, failure="does not build: its process ended, or that of a build beside it")
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def compile_all(
    architectures: Sequence[int], kernels: Sequence[str], jobs: int, console: Console, *, quiet: bool = False
) -> int:
    """Build the kernels for the architectures and report: a table unless ``quiet``, then a JSON line.

    Returns the exit status: 1 if anything must not be shipped, 130 after an interrupt or the signal to terminate,
    which leave a partial report.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled
    start = time.perf_counter()
    builds = planned(kernel_cases.cases(architectures, kernels))
    found: list[Result] = []
    interrupted = False
    try:
        with _progress(len(builds), quiet) as advance:
            for result in results(builds, jobs):
                found.append(result)
                advance(result)
    except KeyboardInterrupt:
        interrupted = True
    faults = [result for result in found if result.fault]
    if not quiet:
        console.print(table(found, architectures))
    for result in faults:
        print(f"{result.build.name}: {result.fault}", file=sys.stderr)
    summary = {
        "benchmark": "kernels --compile",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {jobs} processes",
        "triton": _version(),
        "environment": versions.as_json(),
        "planned": len(builds),
        "built": sum(not result.failure for result in found),
        "failed": sum(bool(result.failure) for result in found),
        "spilling": sum(result.spilled > 0 for result in found),
        "faults": [result.build.name for result in faults],
        "most_registers": {f"sm_{a}": _most(found, a, "registers") for a in architectures},
        "most_shared": {f"sm_{a}": _most(found, a, "shared") for a in architectures},
        "interrupted": interrupted,
        "cpu_seconds": round(sum(result.seconds for result in found), 1),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(summary))
    if interrupted:
        return 130
    return 0 if len(found) == len(builds) > 0 and not faults else 1


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    """What is called with each result: moves a bar on a terminal, prints lines elsewhere."""
    if quiet:
        yield lambda result: None
        return
    start, console = time.perf_counter(), Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("building", total=total)
        done = 0

        def advance(result: Result) -> None:
            nonlocal done
            done += 1
            bar.update(task, advance=1, description=f"{result.build.function} sm_{result.build.case.architecture}")
            if not console.is_terminal and (done % EACH == 0 or done == total):
                print(f"{done} of {total} built, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

        yield advance


def table(found: Sequence[Result], architectures: Sequence[int]) -> Table:
    """The most registers and shared memory by kernel, bits, head dimension and tile, for each architecture."""
    rows: dict[tuple[Any, ...], dict[int, list[Result]]] = {}
    for result in found:
        case = result.build.case
        bits, dims, pairs = case.size
        row = rows.setdefault((result.build.function, bits, dims, pairs or 0), {})
        row.setdefault(case.architecture, []).append(result)
    made = Table("kernel", "bits", "D", "pairs", *(f"sm_{a}" for a in architectures))
    for (function, bits, dims, pairs), by in sorted(rows.items()):
        cells = [_cell(by.get(architecture, [])) for architecture in architectures]
        made.add_row(function, str(bits), str(dims), str(pairs or ""), *cells)
    return made


def _cell(found: Sequence[Result]) -> str:
    if not found:
        return "-"
    registers = max(result.registers for result in found)
    shared = max(result.shared for result in found) / 1024
    text = f"{registers} registers, {shared:.1f} KiB"
    return f"[red]{text}, fault" if any(result.fault for result in found) else text


def _most(found: Sequence[Result], architecture: int, what: str) -> int:
    return max((getattr(result, what) for result in found if result.build.case.architecture == architecture), default=0)


def _version() -> str:
    import triton

    return str(triton.__version__)

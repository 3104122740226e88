"""The Triton kernels: in Triton's interpreter against float64, and as far as they can be seen without running.

The interpreter has to be chosen before Triton is imported, which the rest of the tests must not depend on: the checks
of ``tests/recompute/kernels`` run in a process of their own. On a GPU the same checks run as they are::

    BLEND_KERNEL_DEVICE=cuda pytest tests/recompute/kernels/*.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blend.errors import InvalidInput
from blend.recompute.kernels import dispatch
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels, kernels
from blend.recompute.kernels.launch import collected
from blend.recompute.kernels.memory import Canvases, Pages
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Rotation

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def need_triton() -> None:
    """Triton is part of what CI installs; elsewhere its absence is a skip."""
    if importlib.util.find_spec("triton") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs triton")
        pytest.skip("triton is not installed")


@pytest.fixture
def version() -> Kernels:
    need_triton()
    return kernels(CPU, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["assemble", "attend", "commit", "deviation", "mass", "move", "engine"])
def test_in_the_interpreter(what: str, tmp_path: Path) -> None:
    need_triton()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/recompute/kernels/{what}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "BLEND_KERNEL_DEVICE": "cpu", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_on_a_cpu_triton_is_neither_chosen_nor_imported(backend: str | None) -> None:
    code = (
        "import sys, torch; from blend.recompute.kernels.dispatch import kernels; "
        f"found = kernels(torch.device('cpu'), {backend!r}); "
        "print(found.backend, 'blend.recompute.kernels.device' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [backend or "torch", "False"]


def test_cuda_gets_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    monkeypatch.setattr(dispatch, "_gpu", lambda device: ((9, 0), 227 * 1024))
    assert kernels(torch.device("cuda", 0)).backend == "triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernels(torch.device("cuda", 1)).backend == "torch"
    with pytest.raises(InvalidInput, match="where it is installed"):
        kernels(torch.device("cuda", 1), "triton")


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="backend"):
        kernels(CPU, "cuda")  # type: ignore[arg-type]


def small(length: int = 64, dims: int = 64, dtype: torch.dtype = torch.float32) -> Canvases:
    return Canvases([torch.zeros(2, 2, length, dims, dtype=dtype)], [torch.zeros(2, 2, length, dims, dtype=dtype)])


def test_many_requests_and_all_their_heads_take_one_launch(version: Kernels) -> None:
    lengths = (100, 7, 300)
    memory = Canvases(*([torch.zeros(1, 2, n, 64) for n in lengths] for _ in range(2)))
    batch = Batch([torch.tensor([n - 2, n - 1]) for n in lengths])
    with collected() as launches:
        version.attend(torch.zeros(8, 6, 64), memory, 0, batch, scale=1.0)
        version.commit(torch.zeros(2, 6, 64), torch.zeros(2, 6, 64), memory, 0, batch)
    assert len(launches) == 2


def test_few_rows_over_many_keys_are_split_and_many_rows_are_not(version: Kernels) -> None:
    memory = small(9000)
    with collected() as launches:
        version.attend(torch.zeros(8, 1, 64), memory, 0, Batch([torch.tensor([8999])], processors=100), scale=1.0)
    assert len(launches) == 2
    assert launches[0].grid[0] > 8
    with collected() as launches:
        rows = torch.arange(0, 9000, 6)
        version.attend(torch.zeros(8, len(rows), 64), memory, 0, Batch([rows], processors=100), scale=1.0)
    assert len(launches) == 1


@pytest.mark.parametrize("window", [None, 100])
def test_no_piece_of_work_reads_behind_its_last_row_or_before_its_first_rows_window(window: int | None) -> None:
    at = torch.arange(0, 3000, 11)
    work = Batch([at, at + 5], processors=4).work(2, 3, 64, 32, window)
    covered: dict[tuple[int, int], int] = {}
    for request, first, last, low, high, open_low, open_high, _ in work.pieces.tolist():
        own = (at + 5 * request).tolist()
        begin, end = own[first // 3], own[(last - 1) // 3]
        assert high <= end + 1
        assert low >= (0 if window is None else begin - window + 1 - 31)
        assert low <= open_low <= open_high <= high
        if open_low < open_high:
            assert open_high <= begin + 1
            assert window is None or open_low > end - window
        covered[request, first] = covered.get((request, first), 0) + high - low
    for (request, first), keys in covered.items():
        own = (at + 5 * request).tolist()
        last = min(first + 64, len(at) * 3)
        assert keys >= min(own[(last - 1) // 3] + 1, window or 10**9)
    assert sum(min(64, len(at) * 3 - first) for _, first in covered) == 2 * 3 * len(at)


def bad_calls() -> dict[str, object]:
    memory, at = small(), Batch([torch.tensor([3, 9])])
    rows = torch.zeros(4, 2, 64)
    keys = torch.zeros(2, 2, 64)
    stored = Stored([torch.zeros(1, 2, 2, 8, 64)])
    slots = torch.arange(8)
    layer = memory.keys[0][0]
    return {
        "heads": lambda v: v.attend(torch.zeros(3, 2, 64), memory, 0, at, scale=1.0),
        "rows": lambda v: v.attend(torch.zeros(4, 3, 64), memory, 0, at, scale=1.0),
        "dtype": lambda v: v.attend(rows.half(), memory, 0, at, scale=1.0),
        "float64": lambda v: v.mass(rows.double(), keys.double(), torch.tensor([0, 1]), scale=1.0),
        "head dimension": lambda v: v.mass(rows[..., :4], keys[..., :4], torch.tensor([0, 1]), scale=1.0),
        "layer": lambda v: v.attend(rows, memory, 2, at, scale=1.0),
        "window": lambda v: v.attend(rows, memory, 0, at, scale=1.0, window=0),
        "softcap": lambda v: v.attend(rows, memory, 0, at, scale=1.0, softcap=0.0),
        "behind the canvas": lambda v: v.attend(rows, memory, 0, Batch([torch.tensor([3, 64])]), scale=1.0),
        "requests": lambda v: v.attend(rows, memory, 0, Batch([torch.tensor([3])] * 2), scale=1.0),
        "value": lambda v: v.commit(keys, torch.zeros(2, 1, 64), memory, 0, at),
        "score": lambda v: v.commit(keys, keys, memory, 0, at, score="all"),
        "kv heads": lambda v: v.commit(rows, rows, memory, 0, at),
        "positions": lambda v: v.deviation(keys, layer, torch.tensor([1])),
        "cached": lambda v: v.deviation(keys, layer),
        "means": lambda v: v.move(layer, torch.zeros(2, 2, 64), Spans(((0, 9),), torch.ones(64)), None),
        "spans": lambda v: v.move(layer, torch.zeros(2, 1, 64), Spans(((0, 65),), torch.ones(65)), None),
        "moved": lambda v: v.move(layer, torch.zeros(2, 1, 64), Spans(((0, 9),), torch.ones(8)), None),
        "turns": lambda v: v.move(
            layer, torch.zeros(2, 1, 64), Spans(((0, 9),), torch.ones(64)), Turns(*torch.zeros(2, 8, 32), "half")
        ),
        "slots": lambda v: v.assemble(stored, 0, layer, layer, slots[1:], None),
        "stored layer": lambda v: v.assemble(stored, 1, layer, layer, slots, None),
        "pairs": lambda v: v.assemble(
            stored, 0, layer, layer, slots, Turns.of(Rotation(torch.ones(33), "half"), [1], CPU)
        ),
        "chunks": lambda v: v.assemble(
            stored, 0, layer, layer, slots, Turns.of(Rotation(torch.ones(32), "half"), [1, 2], CPU)
        ),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_what_does_not_fit_is_refused_before_anything_is_launched(name: str, version: Kernels) -> None:
    with collected() as launches, pytest.raises(InvalidInput):
        bad_calls()[name](version)  # type: ignore[operator]
    assert not launches


@pytest.mark.parametrize(
    "make",
    [
        lambda: Batch([]),
        lambda: Batch([torch.tensor([2, 2])]),
        lambda: Batch([torch.tensor([5, 2])]),
        lambda: Batch([torch.tensor([-1, 2])]),
        lambda: Batch([torch.tensor([1.0])]),
        lambda: Batch([torch.tensor([1])], [None, None]),
        lambda: Batch([torch.tensor([1])], [torch.ones(3)]),
        lambda: Canvases([], []),
        lambda: Canvases([torch.zeros(1, 1, 4, 8)], [torch.zeros(1, 1, 5, 8)]),
        lambda: Canvases([torch.zeros(1, 1, 4, 16)[..., ::2]], [torch.zeros(1, 1, 4, 8)]),
        lambda: Canvases([torch.zeros(1, 1, 8, 8)[:, :, ::2]], [torch.zeros(1, 1, 8, 8)[:, :, ::2]]).addresses(0),
        lambda: Canvases([torch.zeros(66)[2:].view(1, 1, 8, 8)], [torch.zeros(1, 1, 8, 8)]).addresses(0),
        lambda: Pages([torch.zeros(4, 16, 2, 8)], [torch.zeros(4, 16, 2, 8)], torch.zeros(1, 3)),
        lambda: Pages([torch.zeros(4, 16, 2, 8)], [torch.zeros(4, 8, 2, 8)], torch.zeros(1, 3, dtype=torch.int32)),
        lambda: Stored([]),
        lambda: Stored([torch.zeros(1, 2, 2, 8, 16, dtype=torch.int8)]),
        lambda: Stored([torch.zeros(1, 2, 2, 8, 16)], [torch.ones(1, 2, 2, 7)]),
        lambda: Stored([torch.zeros(1, 2, 2, 8, 16)], None, [9]),
        lambda: Stored([torch.zeros(1, 2, 2, 8, 16), torch.zeros(1, 2, 2, 8, 16).half()]),
    ],
)
def test_malformed_rows_canvases_pages_and_chunks_are_refused(make: object) -> None:
    with pytest.raises(InvalidInput):
        make()  # type: ignore[operator]

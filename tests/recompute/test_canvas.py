from __future__ import annotations

import pytest
import torch

from blend.errors import InvalidInput
from blend.recompute.canvas import Canvas

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_and_bytes(dtype: torch.dtype) -> None:
    canvas = Canvas(3, 2, 7, 5, dtype, CPU)
    assert canvas.k.shape == canvas.v.shape == (3, 2, 7, 5)
    assert canvas.k.dtype == canvas.v.dtype == dtype
    assert canvas.k.is_contiguous() and canvas.v.is_contiguous()
    assert (canvas.layers, canvas.length) == (3, 7)
    assert canvas.nbytes == 2 * 3 * 2 * 7 * 5 * dtype.itemsize


def test_starts_as_zeros_in_separate_memory() -> None:
    canvas = Canvas(1, 1, 4, 2, torch.float32, CPU)
    assert not canvas.k.any() and not canvas.v.any()
    canvas.k.fill_(1.0)
    assert not canvas.v.any()


def test_made_in_inference_mode_it_can_be_written_outside() -> None:
    with torch.inference_mode():
        canvas = Canvas(1, 1, 4, 2, torch.float32, CPU)
    canvas.k[0, 0, 1] = 3.0
    assert canvas.k.sum() == 6.0


def test_repr_names_its_sizes() -> None:
    assert "L=3, KVH=2, N=7, D=5" in repr(Canvas(3, 2, 7, 5, torch.float32, CPU))


@pytest.mark.parametrize("which", range(4))
def test_refuses_a_size_of_nothing(which: int) -> None:
    sizes = [2, 2, 2, 2]
    sizes[which] = 0
    with pytest.raises(InvalidInput, match="1 or more"):
        Canvas(*sizes, torch.float32, CPU)

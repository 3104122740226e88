"""Which version of the kernels an engine runs, and that all of them answer alike.

Triton's is run in its interpreter by ``test_triton.py``, with the same checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from blend import EngineConfig
from blend.errors import InvalidConfig, InvalidInput
from blend.model.decoder import Decoder, Rows
from blend.recompute.kernels import dispatch
from blend.recompute.kernels.dispatch import kernels_for
from tests import tiny
from tests.models import VOCABULARY, build
from tests.recompute.kernels import engine
from tests.recompute.kernels.common import name_of
from tests.recompute.test_triton import need_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow
@pytest.mark.parametrize("case", engine.PREFILLS, ids=name_of)
def test_an_engine_on_the_reference_answers_like_one_on_torch(case: dict[str, Any], tmp_path: Path) -> None:
    engine.check_prefill(case, "reference", tmp_path)


@pytest.mark.parametrize("case", engine.BATCHES, ids=name_of)
def test_requests_side_by_side_on_the_reference_come_out_as_on_torch(case: dict[str, Any]) -> None:
    engine.check_batch(case, "reference")


def canvas(dims: int = 64, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.empty(2, 2, 1, dims, dtype=dtype, device=device)


def test_a_cpu_gets_torch_unless_another_version_is_asked_for() -> None:
    assert kernels_for(canvas()).backend == "torch"
    assert kernels_for(canvas(), "torch").backend == "torch"
    assert kernels_for(canvas(), "reference").backend == "reference"
    with pytest.raises(InvalidInput, match="reference"):
        kernels_for(canvas(), "numba")  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Have CUDA devices be of that compute capability, with that many KiB of shared memory a block."""

    def be(capability: tuple[int, int], shared: int) -> None:
        monkeypatch.setattr(dispatch, "_gpu", lambda device: (capability, shared * 1024))
        dispatch.kernels.cache_clear()

    yield be
    dispatch.kernels.cache_clear()


Gpu = Callable[[tuple[int, int], int], None]


def test_cuda_gets_triton_for_heads_that_it_takes(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    need_triton()
    gpu((9, 0), 227)
    with FakeTensorMode():
        assert kernels_for(canvas(device="cuda")).backend == "triton"
        assert kernels_for(canvas(device="cuda"), "torch").backend == "torch"
        assert kernels_for(canvas(dims=100, device="cuda")).backend == "torch"
        assert kernels_for(canvas(dims=512, device="cuda")).backend == "torch"
        with pytest.raises(InvalidInput, match="multiple of 8 up to 256"):
            kernels_for(canvas(dims=100, device="cuda"), "triton")
    assert [record.getMessage() for record in caplog.records if "not on Triton" in record.getMessage()] == [
        f"the kernels run on torch, not on Triton: canvas: got (2, 2, 1, {dims}); allowed: 4 dimensions, the last a "
        "multiple of 8 up to 256"
        for dims in (100, 512)
    ]


@pytest.mark.parametrize(
    ("capability", "shared", "why"), [((7, 5), 64, "capability 7.5"), ((9, 0), 99, "101376 bytes")]
)
def test_a_gpu_that_triton_does_not_fit_gets_torch_and_the_log_says_why(
    capability: tuple[int, int], shared: int, why: str, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    need_triton()
    gpu(capability, shared)
    with FakeTensorMode():
        assert kernels_for(canvas(device="cuda")).backend == "torch"
        assert kernels_for(canvas(device="cuda"), "triton").backend == "triton"
    assert [why in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(INTERPRETED, reason="here Triton's interpreter runs everything")
def test_triton_is_refused_where_nothing_can_run_it(tmp_path: Path) -> None:
    need_triton()
    with pytest.raises(InvalidInput, match="TRITON_INTERPRET"):
        kernels_for(canvas(), "triton")
    with pytest.raises(InvalidInput, match="TRITON_INTERPRET"):
        tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store", kernels="triton")


def test_a_version_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="kernels.*auto, torch, triton, reference"):
        EngineConfig(kernels="cuda")  # type: ignore[arg-type]


def test_torch_takes_heads_of_any_size() -> None:
    model = build("llama", head_dim=6)
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        stock = model(input_ids=tokens[None], use_cache=False).logits[0]
    decoder = Decoder(model)
    logits = decoder.forward([Rows(decoder.new_canvas(40), torch.arange(40), tokens)], keep="all")
    torch.testing.assert_close(logits, stock, atol=1e-5 * float(stock.abs().max()), rtol=0)

"""Linear layers that multiply in float32 where a CPU has no 16-bit instructions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blend.model import wide
from blend.model.wide import WideLinear, computes_in, widen

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(1,), (3, 50), (200,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_it_gives_the_product_rounded_once(dtype: torch.dtype, rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = WideLinear(48, 33, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*rows, 48).to(dtype)
    exact = nn.functional.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    found = layer(x)
    assert found.dtype == dtype
    assert found.shape == (*rows, 33)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("can", [True, False])
def test_layers_are_widened_where_the_device_cannot_compute(monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    monkeypatch.setattr(wide, "computes_in", lambda dtype, device: can)

    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), Special(2, 2))
    widen(model, torch.bfloat16, CPU)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert kinds == ([nn.Linear, nn.Linear, Special] if can else [WideLinear, WideLinear, Special])


def test_every_cpu_computes_in_float32() -> None:
    assert computes_in(torch.float32, CPU)
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(computes_in(dtype, CPU), bool)

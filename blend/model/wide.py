"""Linear layers of 16-bit models on CPUs that cannot compute in 16 bits.

Such a CPU runs them by conversion, number by number, at a small part of the rate that it has in float32. Converting a
whole layer's weights and rows first and multiplying in float32 gives the same products and sums, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_FEW_ROWS = 32
"""With fewer rows than this, converting the weights would take longer than it saves."""


class WideLinear(nn.Linear):
    """A linear layer that multiplies in float32. Its weights stay as they are; outputs have the dtype of inputs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
        """``[..., in]`` to ``[..., out]``."""
        if input.numel() < _FEW_ROWS * self.in_features:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return linear(input.float(), self.weight.float(), bias).to(input.dtype)


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices of ``dtype`` with instructions of its own."""
    if device.type == "cuda":
        return dtype != torch.bfloat16 or bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if dtype == torch.float32:
        return True
    facts, short = torch.cpu.get_capabilities(), "bf16" if dtype == torch.bfloat16 else "fp16"
    if facts["architecture"] == "x86_64":
        # oneDNN's own test is true of every CPU with AVX-512, with such instructions or without.
        return bool(facts.get(f"avx512_{short}") or facts.get(f"amx_{short}"))
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")
    return bool(supported())


def widen(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Have the model's linear layers multiply in float32 where ``device`` cannot do so in ``dtype``."""
    if device.type != "cpu" or computes_in(dtype, device):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear

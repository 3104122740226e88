"""One request's stored chunks as the kernel that assembles them wants them: where they lie and how far they turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.memory import check_rows
from blend.recompute.rope import Pairing, Rotation

QUANTIZED = (torch.float8_e4m3fn, torch.int8)
"""Stored dtypes of one byte. A number is the stored one times its token's and head's scale."""

TILE = 64
"""Tokens of one program."""


class Stored:
    """The stored keys and values of C chunks, in the order in which their tokens go onto the canvas.

    Args:
        payloads: for each chunk ``[L, 2, KVH, T, D]``, keys then values of each layer, all in one dtype: float32,
            float16, bfloat16, float8_e4m3fn or int8. The table is to be had only where tokens lie side by side, from
            a multiple of 16 bytes on.
        scales: for each chunk ``[L, 2, KVH, T]`` float32, in any layout (one scale a head may be expanded over its
            tokens); ``None``: all are 1, which int8 does not allow.
        tokens: how many of each chunk's T tokens count, from the first on; ``None``: all.
    """

    def __init__(
        self,
        payloads: Sequence[Tensor],
        scales: Sequence[Tensor] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> None:
        if not payloads:
            raise InvalidInput("payloads", "none", "those of one or more chunks")
        first = payloads[0]
        for payload in payloads:
            kind = (payload.ndim, payload.dtype, payload.device, *payload.shape[:3], *payload.shape[4:])
            if kind != (5, first.dtype, first.device, first.shape[0], 2, first.shape[2], first.shape[4]):
                raise InvalidInput("payload", (tuple(payload.shape), payload.dtype), "[L, 2, KVH, T, D], all alike")
        if scales is None and first.dtype == torch.int8:
            raise InvalidInput("scales", None, "one tensor a chunk, for int8")
        if scales is not None and len(scales) != len(payloads):
            raise InvalidInput("scales", len(scales), f"one for each of {len(payloads)} chunks")
        for scale, payload in zip(scales or (), payloads, strict=False):
            if (scale.dtype, scale.device, scale.shape) != (torch.float32, first.device, payload.shape[:4]):
                raise InvalidInput("scale", (tuple(scale.shape), scale.dtype), "[L, 2, KVH, T] float32")
        self.payloads = tuple(payloads)
        self.scales = None if scales is None else tuple(scales)
        self.tokens = tuple(payload.shape[3] for payload in payloads) if tokens is None else tuple(tokens)
        if len(self.tokens) != len(payloads) or any(
            not 1 <= count <= payload.shape[3] for count, payload in zip(self.tokens, payloads, strict=False)
        ):
            raise InvalidInput("tokens", self.tokens, "1 to T for each chunk")

    @property
    def device(self) -> torch.device:
        """Of all chunks."""
        return self.payloads[0].device

    @property
    def total(self) -> int:
        """How many tokens there are in all."""
        return sum(self.tokens)

    def numbers(self, chunk: int, layer: int) -> Tensor:
        """A chunk's keys and values ``[2, KVH, tokens, D]`` in float32, in plain torch."""
        count = self.tokens[chunk]
        plain = self.payloads[chunk][layer, :, :, :count].float()
        return plain if self.scales is None else plain * self.scales[chunk][layer, :, :, :count, None]

    @cached_property
    def table(self) -> Tensor:
        """``[C, 11]`` int64: distance of the payload from the first one and its strides of layer, part and head; the
        same of the scales, with that of tokens; number of tokens, and of those in chunks before."""
        for payload in self.payloads:
            check_rows("payload", payload, dense=True)
        size = self.payloads[0].element_size()
        rows, before = [], 0
        for index, (payload, count) in enumerate(zip(self.payloads, self.tokens, strict=True)):
            scale = [0, 0, 0, 0, 0]
            if self.scales is not None:
                own = self.scales[index]
                scale = [(own.data_ptr() - self.scales[0].data_ptr()) // 4, *own.stride()]
            distance = (payload.data_ptr() - self.payloads[0].data_ptr()) // size
            rows.append([distance, *payload.stride()[:3], *scale, count, before])
            before += count
        return torch.tensor(rows, dtype=torch.int64).to(self.device)

    @cached_property
    def tiles(self) -> Tensor:
        """``[tiles, 2]`` int32: chunk and first token of each program."""
        rows = [(chunk, at) for chunk, count in enumerate(self.tokens) for at in range(0, count, TILE)]
        return torch.tensor(rows, dtype=torch.int32).to(self.device)


@dataclass(frozen=True, eq=False)
class Turns:
    """How far the keys of each chunk, or each position, turn: ``cos`` and ``sin``, ``[C, P]`` float32, for P pairs."""

    cos: Tensor
    sin: Tensor
    pairing: Pairing

    @classmethod
    def of(cls, rotation: Rotation, shifts: Sequence[int], device: torch.device) -> Turns:
        """Those of ``rotation`` by one constant shift a chunk, in positions; worked out on the host."""
        cos, sin = torch.from_numpy(np.stack([rotation.by(shift).table for shift in shifts], 1)).to(device)
        return cls(cos, sin, rotation.pairing)

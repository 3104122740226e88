"""The engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from blend.config.checks import at_least, one_of
from blend.config.shadow import ShadowConfig
from blend.config.store import StoreConfig
from blend.errors import InvalidConfig

MAX_THREADS = 1024
KERNELS = ("auto", "torch", "triton", "reference")


@dataclass(frozen=True)
class EngineConfig:
    """The engine.

    Args:
        model: ``smollm2-135m`` (embedded default), a directory in transformers format, or a hub id.
        device: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.
        dtype: ``auto`` (bfloat16 where the device computes in it, else float32), or a name.
        kernels: what attention and the selectors' sums run on: ``auto`` (Triton on CUDA where it is installed and the
            GPU has room for it, else torch), ``torch``, ``triton``, or ``reference`` (short and slow: what the others
            are held against).
        sink: the tokens that every chunk is encoded behind and that are dropped afterwards: ``bos`` (the
            tokenizer's BOS, or its template's first token) or token ids; an empty tuple means none.
        max_rows: most rows of one forward pass; longer prefills run in slices of this size.
        shared_rows: most rows of prompts in a pass that other requests wait for, so that answers keep flowing while
            prompts are computed; ``None``: 256 on a CPU, 2048 on a GPU.
        max_running: most requests that are computed together.
        max_waiting: most requests that wait to begin; further ones are refused.
        threads: CPU threads for torch; ``None`` leaves torch's own setting.
        recompute_misses: whether a chunk that was missing is encoded for later, after its request.
        store: the tiered store.
        shadow: which requests are compared with full prefill after their answer.
    """

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    kernels: Literal["auto", "torch", "triton", "reference"] = "auto"
    sink: str | tuple[int, ...] = "bos"
    max_rows: int = 8192
    shared_rows: int | None = None
    max_running: int = 64
    max_waiting: int = 256
    threads: int | None = None
    recompute_misses: bool = True
    store: StoreConfig = field(default_factory=StoreConfig)
    shadow: ShadowConfig = field(default_factory=ShadowConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidConfig("model", self.model, "a name, a directory or a hub id")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidConfig("device", self.device, "auto, cpu or cuda")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise InvalidConfig("dtype", self.dtype, "auto, float32, bfloat16 or float16")
        one_of("kernels", self.kernels, KERNELS)
        if isinstance(self.sink, str):
            if self.sink != "bos":
                raise InvalidConfig("sink", self.sink, "'bos' or a tuple of token ids")
        elif not all(isinstance(t, int) and t >= 0 for t in self.sink):
            raise InvalidConfig("sink", self.sink, "'bos' or a tuple of token ids")
        at_least("max_rows", self.max_rows, 1, "rows")
        if self.shared_rows is not None:
            at_least("shared_rows", self.shared_rows, 1, "rows")
        at_least("max_running", self.max_running, 1, "requests")
        at_least("max_waiting", self.max_waiting, 1, "requests")
        if self.threads is not None:
            at_least("threads", self.threads, 1, "threads")
            if self.threads > MAX_THREADS:
                raise InvalidConfig("threads", self.threads, f"at most {MAX_THREADS}")

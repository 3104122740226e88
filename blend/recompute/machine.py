"""What measured times depend on besides the model: the processor or GPU, its threads, the dtype."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Return one line that is the same where the same work takes the same time: ``Xeon …, 2 threads, float32``."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{where}, {str(dtype).removeprefix('torch.')}"


def processor() -> str:
    """Return the processor's name, or its architecture where the system does not tell more."""
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

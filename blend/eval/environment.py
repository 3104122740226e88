"""Where something is measured: versions, machine, threads, device."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

import blend
from blend.engine import Engine
from blend.eval.values import Environment


def environment(engine: Engine) -> Environment:
    """Return what an engine runs on."""
    device = engine.decoder.device
    return Environment(
        blend=blend.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        platform=platform.platform(),
        cpu=_cpu(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    )


def _cpu() -> str:
    """Return the processor's name as the kernel knows it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())

"""Where something is measured: versions, machine, threads, device."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

import blend
from blend.engine import Engine
from blend.eval.values import Environment
from blend.recompute import machine


def environment(engine: Engine) -> Environment:
    """Return what an engine runs on."""
    device = engine.decoder.device
    return Environment(
        blend=blend.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        platform=platform.platform(),
        cpu=machine.processor(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    )

"""Sizes, and where blend keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

GiB = 1 << 30
MiB = 1 << 20


def cache_dir() -> Path:
    """Directory for models and stored KV: ``$BLEND_CACHE``, else ``$XDG_CACHE_HOME/blend``, else ``~/.cache/blend``."""
    if root := os.environ.get("BLEND_CACHE"):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "blend"

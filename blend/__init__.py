"""blend: answers over documents from KV that was computed beforehand, with an honest report beside each one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blend.config import EngineConfig, RagConfig, ServerConfig, StoreConfig
from blend.errors import BlendError
from blend.types import (
    Answer,
    Chunk,
    ChunkReport,
    Comparison,
    Part,
    Plan,
    Prefill,
    Prompt,
    Report,
    Sampling,
    Text,
    Timings,
    Token,
    Usage,
)

if TYPE_CHECKING:
    from blend.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BlendError",
    "Chunk",
    "ChunkReport",
    "Comparison",
    "Engine",
    "EngineConfig",
    "Part",
    "Plan",
    "Prefill",
    "Prompt",
    "RagConfig",
    "Report",
    "Sampling",
    "ServerConfig",
    "StoreConfig",
    "Text",
    "Timings",
    "Token",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: a client needs the types and errors, but not torch."""
    if name == "Engine":
        from blend.engine import Engine

        return Engine
    raise AttributeError(f"module 'blend' has no attribute {name!r}")

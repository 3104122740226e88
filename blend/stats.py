"""What an engine has done since it started."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from blend.store import TierStats
from blend.types import Report


class Counters:
    """Counts over all requests; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._modes: dict[str, int] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def finished(self, report: Report) -> None:
        """Count a request that reached its first token."""
        with self._lock:
            self._modes[report.mode] = self._modes.get(report.mode, 0) + 1
        for name, amount in (
            ("requests", 1),
            ("prompt_tokens", report.tokens),
            ("cached_tokens", report.cached),
            ("selected_tokens", report.selected),
            ("ttft_ms", report.timings.ttft),
        ):
            self.add(name, amount)
        for chunk in report.chunks:
            self.add(f"chunks_{chunk.outcome}")

    def snapshot(self) -> dict[str, Any]:
        """Return all counts, requests by mode under ``modes``."""
        with self._lock:
            return {**self._counts, "modes": dict(self._modes)}


@dataclass(frozen=True)
class EngineStats:
    """The model's identity and shape, counters since start, and every tier's state."""

    model: str
    model_fingerprint: str
    device: str
    dtype: str
    layers: int
    kv_bytes_per_token: int
    max_positions: int
    calibrated: bool
    waiting: int
    counters: dict[str, Any]
    background: dict[str, int]
    tiers: tuple[TierStats, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dicts, lists, strings and numbers."""
        return asdict(self)

"""Hot keys: whether a few chunks are most of what is read."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from blend.types import ChunkReport

logger = logging.getLogger("blend_server")

_WINDOW = 4096
_RANKS = 5
_HOT = 0.2


class HotChunks:
    """Counts which chunks are read, window by window. Thread-safe.

    A window's keys are counted exactly and then forgotten; its largest shares stand until the next one is full. The
    log names a chunk that has more than a fifth of a window's reads, for keys have no place in a metric.

    Args:
        window: reads that are counted together.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seen = 0
        self._shares: tuple[float, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """The largest shares of the last full window's reads, descending; none before the first is full."""
        with self._lock:
            return self._shares

    def read(self, chunks: Sequence[ChunkReport]) -> None:
        """Count the hits of one prompt, each chunk once."""
        keys = {chunk.key for chunk in chunks if chunk.outcome == "hit"}
        with self._lock:
            self._counts.update(keys)
            self._seen += len(keys)
            if self._seen < self._window:
                return
            largest = self._counts.most_common(_RANKS)
            shares = self._shares = tuple(count / self._seen for _, count in largest)
            self._counts.clear()
            self._seen = 0
        if shares[0] > _HOT:
            logger.warning("event=hot_chunk key=%s share=%.3f", largest[0][0], shares[0])

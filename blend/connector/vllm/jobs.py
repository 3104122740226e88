"""What the connector's two halves tell each other: requests to blend, and what became of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blend.connector.client import BlendRequest
from blend.types import ChunkReport


@dataclass(frozen=True)
class Job:
    """A request whose blocks are to be filled.

    Args:
        request_id: vLLM's.
        request: what the client asked for.
        blocks: the request's block table.
        computed: positions before this one hold exact KV that other requests may share; they are never written.
        end: the position to fill up to, exclusive; what follows is vLLM's own to compute.
    """

    request_id: str
    request: BlendRequest
    blocks: tuple[int, ...]
    computed: int
    end: int


@dataclass(frozen=True)
class Report:
    """What became of a request.

    ``computed`` tokens were there already, in blocks that vLLM found again, and ``filled`` ones behind them were filled
    in. ``cached`` tokens of the prompt came from the store, ``selected`` of these were to be computed afresh, and
    ``recomputed`` counts what was computed in the blocks, plain text included. ``charged_ratio`` is as in
    :class:`blend.Report`. Times are in milliseconds.
    """

    method: str
    reason: str
    computed: int
    filled: int
    cached: int
    selected: int
    recomputed: int
    charged_ratio: float
    chunks: tuple[ChunkReport, ...]
    load_ms: float
    select_ms: float
    recompute_ms: float
    selected_positions: tuple[int, ...] | None = None
    recomputed_positions: tuple[int, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON holds."""
        return {name: value for name, value in asdict(self).items() if value is not None}

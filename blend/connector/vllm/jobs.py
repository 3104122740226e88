"""What the connector's two halves tell each other: requests to blend, and what became of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from blend.connector.client import BlendRequest
from blend.model.shards import ELSEWHERE
from blend.types import ChunkReport

_TIMES = ("load_ms", "select_ms", "recompute_ms", "waited_ms", "paused_ms")


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
    ``recomputed`` counts what was computed, plain text included, and tokens that were there already but had to be
    computed once more. ``charged_ratio`` is as in :class:`blend.Report`, and so is ``predicted_kl``; ``ratio`` is the
    one that was asked for. Times are in milliseconds: ``waited_ms`` until its turn came, the store's included, then
    ``load_ms``, ``select_ms`` and ``recompute_ms`` of work, and ``paused_ms`` in which the engine's steps went on.
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
    waited_ms: float = 0.0
    paused_ms: float = 0.0
    ratio: float = 1.0
    predicted_kl: float | None = None
    selected_positions: tuple[int, ...] | None = None
    recomputed_positions: tuple[int, ...] | None = None

    def timed(self, waited: float, paused: float) -> Report:
        """Return the report with the seconds in which nothing was done for the request."""
        return replace(self, waited_ms=waited * 1e3, paused_ms=paused * 1e3)

    def beside(self, other: Report) -> Report:
        """Return one report of what two ranks did for a request: the bytes of both, and the times of the slower one."""
        if len(self.chunks) != len(other.chunks):
            return self  # one of them failed
        chunks = tuple(
            # The one that lacked a chunk knows why.
            replace(theirs if mine.reason == ELSEWHERE else mine, key=mine.key, nbytes=mine.nbytes + theirs.nbytes)
            for mine, theirs in zip(self.chunks, other.chunks, strict=True)
        )
        slower = {name: max(getattr(self, name), getattr(other, name)) for name in _TIMES}
        return replace(self, chunks=chunks, **slower)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON holds."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Outcomes:
    """What became of requests since the last step, by vLLM's ids.

    ``ended`` are no longer under way: blended, given up, ``failed``, which are those whose blocks were not filled, or
    ``refused``, whose blocks were not to be. ``encoded`` counts missing chunks that were encoded.
    """

    ended: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    reports: tuple[tuple[str, Report], ...] = ()
    encoded: int = 0

    def beside(self, other: Outcomes) -> Outcomes:
        """Return what two ranks tell of the same requests as one. Blocks are filled where they are on both."""
        theirs = dict(other.reports)
        reports = tuple((name, mine.beside(theirs.get(name, mine))) for name, mine in self.reports)
        ended, failed, refused = self.ended | other.ended, self.failed | other.failed, self.refused | other.refused
        return Outcomes(ended, failed, refused, reports, self.encoded)

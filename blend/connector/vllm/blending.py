"""One request in the worker: find → load → select on a scratch canvas; write vLLM's blocks.

What is not cached is computed in the blocks, where KV is moved by it in two passes: before the question and from it on.
Where blocks have moved KV already it is computed on the canvas, for they cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from blend.chunks import ChunkCache, Which
from blend.connector.client import BlendRequest
from blend.connector.vllm.jobs import Job, Report
from blend.connector.vllm.pages import Pages, Watch
from blend.connector.vllm.tasks import checkpoint, clock, rows_at_once
from blend.errors import TierUnavailable
from blend.filling import ChunkLost, Filling, Loaded, Lost
from blend.finding import found_of
from blend.model.decoder import Decoder
from blend.pipeline import describe
from blend.recompute import passes, planner, prefill
from blend.recompute.calibration import Calibration
from blend.recompute.correct import Correction
from blend.recompute.select import Blend, Selection, selector
from blend.store import ObjectKey
from blend.types import Chunk

_log = logging.getLogger(__name__)


class Blender:
    """Fills requests' blocks, one at a time.

    Args:
        decoder: vLLM's model as a decoder of rows on canvases.
        pages: its paged cache.
        chunks: its chunks in the store.
        calibration: what ``auto`` goes by, or ``None``.
    """

    def __init__(self, decoder: Decoder, pages: Pages, chunks: ChunkCache, calibration: Calibration | None) -> None:
        self._decoder = decoder
        self._pages = pages
        self._chunks = chunks
        self._calibration = calibration
        # Told of no pass, it compares by FLOPs: ranks that share the model decide alike, however long they take.
        self._speed = planner.PrefillSpeed(decoder)

    def find(self, job: Job) -> Filling:
        """Look up a job's chunks, and wait as long as the store's prefetch policy says. From any thread."""
        filling = self._find(job.request, planner.decide(job.request.plan, self._calibration), {})
        filling.wait(whole=True)
        return filling

    def _find(self, request: BlendRequest, decision: planner.Decision, lost: Lost) -> Filling:
        which: Which = "none" if decision.method == "full" else "all"
        return self._chunks.find(request.prompt, request.tenant, request.plan.variant, which, lost)

    def run(self, job: Job, find: Callable[[], Filling]) -> tuple[Report, tuple[Chunk, ...]]:
        """Fill the job's blocks; returns its report, and the chunks that the store could not give.

        A chunk that is lost while it is read costs a second attempt without it, a second one makes it a full prefill;
        nothing is written to a block before all of a request's chunks are whole on the canvas.

        Args:
            job: what is to be done.
            find: gives what :meth:`find` returned for it, which is closed.
        """
        lost: dict[ObjectKey, str] = {}
        decision = planner.decide(job.request.plan, self._calibration)
        while True:
            try:
                with self._everywhere(find) as filling:
                    return self._attempt(job, decision, filling)
            except ChunkLost as error:
                _log.warning("planning again: %s", str(error))
                if lost:
                    decision = planner.give_up(decision, f"two chunks were lost while they were loaded: {error.reason}")
                lost[error.wanted] = error.reason
            find = partial(self._find, job.request, decision, lost)  # without waiting, for the engine would

    def _everywhere(self, find: Callable[[], Filling]) -> Filling:
        """Return what ``find`` returns. Where it fails on one of the ranks that share the model, it fails on all."""
        filling, fault = None, None
        try:
            filling = find()
        except Exception as error:  # noqa: BLE001 - the other ranks have to be told, whatever it is
            fault = error
        everywhere = all(self._decoder.shards.everywhere([filling is not None]))
        if filling is not None and everywhere:
            return filling
        if filling is not None:
            filling.close()
        raise fault or TierUnavailable("another rank could not look up its chunks")

    def compute(self, job: Job, reason: str) -> Report:
        """Fill the job's blocks at full prefill, with nothing from the store; returns its report."""
        begun = clock()
        token_ids = torch.tensor(job.request.prompt.token_ids, device=self._decoder.device)
        positions = torch.arange(job.computed, job.end, device=token_ids.device)
        self._pages.recompute(token_ids[positions], positions, job.blocks)
        return Report(
            method="full",
            reason=reason,
            computed=job.computed,
            filled=job.end - job.computed,
            cached=0,
            selected=0,
            recomputed=len(positions),
            charged_ratio=1.0,
            chunks=(),
            load_ms=0.0,
            select_ms=0.0,
            recompute_ms=(clock() - begun) * 1e3,
            predicted_kl=0.0,
        )

    def _attempt(self, job: Job, decision: planner.Decision, filling: Filling) -> tuple[Report, tuple[Chunk, ...]]:
        begun, request = clock(), job.request
        decision, loaded, blend = self._lay_out(request, decision, filling)
        laid_out = clock()
        # Chosen over the whole prompt, also where a prefix is in the blocks already: a request that comes again meets
        # blocks of its own there, and goes on as they began.
        chooser, budget = selector(decision.method), decision.budget(self._decoder.layers, blend.cached)
        selection = Selection(torch.zeros(0, dtype=torch.int64)) if chooser is None else chooser.select(blend, budget)
        selected, chosen = selection.positions, clock()
        rows = self._fill(job, blend, selection)
        missed = [r.start for r in loaded.reports if r.outcome in ("miss", "failed")]
        report = Report(
            method=decision.method,
            reason=decision.reason,
            computed=job.computed,
            filled=job.end - job.computed,
            cached=blend.cached,
            selected=len(selected),
            recomputed=len(rows),
            charged_ratio=1.0 if decision.method == "full" else budget.charged(selection.probe, len(selected)),
            chunks=tuple(loaded.reports),
            load_ms=(laid_out - begun) * 1e3,
            select_ms=(chosen - laid_out) * 1e3,
            recompute_ms=(clock() - chosen) * 1e3,
            ratio=decision.ratio,
            predicted_kl=decision.predicted_kl,
            selected_positions=tuple(selected.tolist()) if request.positions else None,
            recomputed_positions=tuple(rows.tolist()) if request.positions else None,
        )
        return report, _chunks_at(request, missed)

    def _lay_out(
        self, request: BlendRequest, decision: planner.Decision, filling: Filling
    ) -> tuple[planner.Decision, Loaded, Blend]:
        """Load a request's chunks onto a canvas, all layers of them; the decision is revised by what there was."""
        decoder, prompt, max_rows = self._decoder, request.prompt, rows_at_once(self._pages.max_rows)
        canvas = decoder.new_canvas(len(prompt))
        token_ids = torch.tensor(prompt.token_ids, device=decoder.device)
        loaded = filling.settle()
        blend = describe(decoder, prompt, canvas, token_ids, loaded, max_rows)
        found = found_of(blend, loaded)
        # An exact prefix is for vLLM's own cache to find.
        decision = planner.settle(decision, request.plan, self._calibration, found, self._speed, prefix=False)
        if decision.method == "full":
            loaded = loaded.unused()
            return decision, loaded, describe(decoder, prompt, canvas, token_ids, loaded, max_rows)
        filling.onto(canvas)
        for layer in range(decoder.layers):
            canvas.need(layer)
            checkpoint()
        return decision, loaded, blend

    def _fill(self, job: Job, blend: Blend, selection: Selection) -> Tensor:
        """Write what is on the canvas for good, and compute the rest; returns the positions that were computed."""
        own = _own(job, blend)
        correction = selection.correction
        if correction is not None and job.computed >= correction.start:
            correction = None  # the blocks have all that it moves
        if correction is not None and job.computed > correction.spans.bounds[0][0]:
            return self._fill_again(job, blend, selection, correction)
        final = torch.arange(len(own), device=own.device) < selection.exact_until
        wanted = blend.text | blend.missing
        wanted[selection.positions] = True
        held = (final | ~wanted) & own
        self._write(blend, held.nonzero().squeeze(1), job.blocks)
        rows = (wanted & ~final & own).nonzero().squeeze(1)
        asked = rows
        if correction is not None:
            before = rows < correction.start
            self._compute(job, blend, rows[before], partial(_saw, correction, blend))
            self._move(job, blend, correction)
            asked = rows[~before]
        self._compute(job, blend, asked)
        return rows

    def _compute(self, job: Job, blend: Blend, rows: Tensor, watch: Watch | None = None) -> None:
        if len(rows):
            self._pages.recompute(blend.token_ids[rows], rows, job.blocks, watch)

    def _move(self, job: Job, blend: Blend, correction: Correction) -> None:
        """Move KV on the canvas, and put it into the blocks in the place of what was stored."""
        for layer in range(self._decoder.layers):
            correction.apply(layer, blend.canvas.k[layer], blend.canvas.v[layer])
            checkpoint()
        self._write(blend, correction.spans.moved.nonzero().squeeze(1), job.blocks)

    def _fill_again(self, job: Job, blend: Blend, selection: Selection, correction: Correction) -> Tensor:
        """Compute on the canvas where blocks have moved KV already; returns the positions that were computed.

        Blocks cannot be read, and who stands before the question must not see KV that is moved: what the blocks have is
        computed once more, and comes out as it did then.
        """
        rows = prefill.rows_of(blend, selection)
        rows = rows[rows < job.end]
        observer = correction.observer()
        passes.run(self._decoder, blend.canvas, blend.token_ids, rows, blend.max_rows, observer=observer)
        observer.finish(blend.canvas)
        self._write(blend, _own(job, blend).nonzero().squeeze(1), job.blocks)
        return rows

    def _write(self, blend: Blend, positions: Tensor, blocks: Sequence[int]) -> None:
        if not len(positions):
            return
        slots = self._pages.slots(positions, blocks)
        for layer in range(self._decoder.layers):
            key, value = (
                stored[layer].index_select(1, positions).transpose(0, 1).contiguous()
                for stored in (blend.canvas.k, blend.canvas.v)
            )
            self._pages.write(layer, slots, key, value)
            checkpoint()


def _saw(correction: Correction, blend: Blend, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
    """Note how far the fresh KV ``[R, KVH, D]`` of a pass is from what is stored."""
    shown = correction.shown(positions)
    if len(shown):
        fresh = key[shown.rows].transpose(0, 1), value[shown.rows].transpose(0, 1)
        canvas, at = blend.canvas, shown.positions
        stored = canvas.k[layer].index_select(1, at), canvas.v[layer].index_select(1, at)
        correction.saw(layer, shown, fresh, stored)


def _own(job: Job, blend: Blend) -> Tensor:
    """``[N]`` bool: the positions that the job is to fill."""
    positions = torch.arange(len(blend.token_ids), device=blend.token_ids.device)
    return (positions >= job.computed) & (positions < job.end)


def _chunks_at(request: BlendRequest, starts: Sequence[int]) -> tuple[Chunk, ...]:
    at = {start: part.chunk for start, part in request.prompt.parts()}
    return tuple(dict.fromkeys(at[start] for start in starts))

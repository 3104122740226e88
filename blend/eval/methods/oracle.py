"""An oracle: rows chosen by what they do to an answer that is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from blend.errors import InvalidInput
from blend.eval.metrics import kl_rows
from blend.model.decoder import Rows
from blend.recompute.budget import Budget
from blend.recompute.canvas import Canvas
from blend.recompute.passes import unstopped
from blend.recompute.prefill import Outcome, Repair, blended
from blend.recompute.select import Blend, Selection
from blend.types import Prefill

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the trials done and the most that there may be."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A prompt at full prefill, and the answer that is to be kept.

    ``prefill``'s canvas has room for all but the last of ``answer_ids`` (one or more tokens, usually full prefill's
    own greedy answer).
    """

    prefill: Prefill
    answer_ids: tuple[int, ...]


class Oracle(Repair):
    """Rows chosen greedily by how much full prefill's KV in their place lowers the answer's KL.

    Candidates go in blocks of neighbours. In each of ``rounds`` rounds every block that is left is tried by itself:
    full prefill's keys and values take the cached ones' place, on top of what earlier rounds chose, and the mean
    KL(full ‖ blended) along the answer is computed, teacher-forced. The best blocks are kept until the round's share
    of the rows is there. Then the chosen rows are recomputed like those of any other method: they get no KV of full
    prefill's, so this is a guide to what choosing can do and no bound.

    With C candidates this takes up to ``rounds × C / block`` trials, each a pass of the plain text behind the first
    loaded chunk and of the answer, and a second canvas: minutes a question for a small model on a CPU. One round ranks
    blocks by what each does alone; as many rounds as there are blocks to choose make the choice fully greedy.

    The charge counts all of that: the full prefill, and the rows of every trial in every layer. It is far above 1.

    Args:
        reference: the prompt at full prefill.
        log_probs: ``[T, V]`` of full prefill at each of the answer's T tokens, from ``engine.continuation``.
        ratio: share of the cached tokens to choose.
        block: tokens of a block; chunk ends and exact tokens cut blocks short.
        rounds: how often blocks are tried again.
        progress: told of every trial.

    Raises:
        InvalidInput: ``block`` or ``rounds`` below 1.
    """

    name = "oracle"

    def __init__(
        self,
        reference: Reference,
        log_probs: Tensor,
        ratio: float,
        *,
        block: int = 4,
        rounds: int = 1,
        progress: Progress | None = None,
    ) -> None:
        for what, number in (("block", block), ("rounds", rounds)):
            if number < 1:
                raise InvalidInput(what, number, "1 or more")
        self.ratio = ratio
        self._reference = reference
        self._log_probs = log_probs
        self._block = block
        self._rounds = rounds
        self._progress = progress

    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        """Choose, then compute mandatory and chosen rows.

        Raises:
            InvalidInput: the reference is of another prompt's length.
        """
        if self._reference.prefill.report.tokens != len(blend.token_ids):
            tokens = f"{self._reference.prefill.report.tokens} tokens"
            raise InvalidInput("reference", tokens, f"full prefill of this prompt, {len(blend.token_ids)} tokens")
        return blended(blend, self._choose, budget)

    def _choose(self, blend: Blend, budget: Budget) -> Selection:
        where = blend.candidates.nonzero().squeeze(1)
        rows = min(budget.rows(probe=0), len(where))
        if rows in (0, len(where)):
            return Selection(where[:rows])
        trials = _Trials(blend, self._reference, self._log_probs)
        left = _blocks(blend, self._block)
        most, done = self._rounds * len(left), 0
        chosen: list[Tensor] = []
        for step in range(1, self._rounds + 1):
            share = math.ceil(rows * step / self._rounds)
            if sum(map(len, chosen)) >= share:
                continue
            found = []
            for block in left:
                found.append(trials.kl_with(block))
                done += 1
                if self._progress is not None:
                    self._progress(done, most)
            order = sorted(range(len(left)), key=found.__getitem__)
            taken = 0
            while (have := sum(map(len, chosen))) < share:
                block = left[order[taken]][: rows - have]
                trials.keep(block)
                chosen.append(block)
                taken += 1
            left = [left[i] for i in sorted(order[taken:])]
        probe = (blend.cached + done * trials.rows) * blend.decoder.layers
        return Selection(torch.cat(chosen).sort().values, probe)


def _blocks(blend: Blend, size: int) -> list[Tensor]:
    """The candidates in blocks ``[≤ size]`` of neighbours within one chunk."""
    blocks: list[Tensor] = []
    for start, end in blend.chunks:
        inside = start + blend.candidates[start:end].nonzero().squeeze(1)
        blocks += [part for part in inside.split(size) if len(part)]
    return blocks


class _Trials:
    """A canvas on which full prefill's KV can take the place of cached KV, and what the answer's KL then is.

    Left of the first loaded chunk it holds full prefill's KV, which is exact there. Attribute ``rows``: how many one
    trial computes.
    """

    def __init__(self, blend: Blend, reference: Reference, log_probs: Tensor) -> None:
        self._decoder = blend.decoder
        self._full = reference.prefill.canvas
        self._log_probs = log_probs
        tokens, answer = len(blend.token_ids), reference.answer_ids[:-1]
        blend.canvas.need(blend.decoder.layers - 1)
        self._canvas = blend.decoder.new_canvas(tokens + len(answer))
        _copy(blend.canvas, self._canvas, torch.arange(tokens, device=blend.token_ids.device))
        mandatory = (blend.text | blend.missing).nonzero().squeeze(1)
        _copy(self._full, self._canvas, mandatory[mandatory < blend.first_loaded])
        behind = torch.arange(tokens, self._canvas.length, device=mandatory.device)
        self._positions = torch.cat((mandatory[mandatory >= blend.first_loaded], behind))
        ids = torch.cat((blend.token_ids, blend.token_ids.new_tensor(answer)))
        self._token_ids = ids[self._positions]
        self.rows = len(self._positions)

    def keep(self, positions: Tensor) -> None:
        """Put full prefill's KV at these positions for good."""
        _copy(self._full, self._canvas, positions)

    def kl_with(self, positions: Tensor) -> float:
        """Return the answer's mean KL in nats if full prefill's KV stood at these positions."""
        k, v = self._canvas.k[:, :, positions], self._canvas.v[:, :, positions]  # copies, as for any index tensor
        self.keep(positions)
        rows = Rows(self._canvas, self._positions, self._token_ids)
        logits = unstopped(self._decoder.forward([rows], keep="all"))[-len(self._log_probs) :]
        self._canvas.k[:, :, positions], self._canvas.v[:, :, positions] = k, v
        return float(kl_rows(self._log_probs, logits.log_softmax(-1)).mean())


def _copy(source: Canvas, target: Canvas, positions: Tensor) -> None:
    """Copy the KV of all layers at ``positions``."""
    target.k[:, :, positions] = source.k[:, :, positions]
    target.v[:, :, positions] = source.v[:, :, positions]

"""CacheBlend as its authors' code runs it, to show what two faults of that code cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blend.model.decoder import Decoder, LayerAttention, Observer, Rows, StopForward
from blend.recompute import passes
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.budget import Budget
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.kernels.memory import Memory
from blend.recompute.prefill import Clock, Outcome, Repair
from blend.recompute.select import Blend, Selection
from blend.types import Prompt

CHECK_LAYER = 1


class Released(Repair):
    """CacheBlend (EuroSys 2025) as released: github.com/YaoJiayi/CacheBlend, revision b72d794.

    What is reproduced of ``vllm_blend/vllm/attention/backends/xformers.py``, ``…/model_executor/models/llama.py`` and
    the scripts in ``example/``:

    - Every part of the prompt is encoded by itself, plain text and the question like the passages; the first part at
      position 0, the others behind the sink.
    - All tokens run through layer 0 and are projected at layer 1, whose fresh keys and values all stay.
    - Of all tokens but the last ``suffix_len``, ``int(count × ratio)`` are chosen once, by the squared deviation of V
      at layer 1. The scripts set ``suffix_len = len([q_ids + s_end])``, which is 1: the question's tokens compete
      with those of the passages, and only the last one is always computed.
    - The chosen tokens alone run from layer 1 on, under ``LowerTriangularFromBottomRightMask``. Of R rows over N keys
      row i then reads keys 0 to N - R + i, which lie beyond its own position unless all behind it are chosen too.

    What differs: rows are chosen in one pass and run in another, from layer 0 on. Layers 0 and 1 of the chosen rows
    are so computed twice, with the same result, and charged twice. Passages come from the store; one that is not
    there is encoded here.

    The charge is every cached token in layers 0 and 1, and the chosen cached ones in every layer. All rows of the
    second pass run at once, however many they are: under this mask slices would not give the same result.

    Args:
        prompt: the prompt to be prefilled.
        sink: token ids that chunks are encoded behind.
        ratio: share of the prompt's tokens, but for the last one, that is chosen.
    """

    name = "deviation-released"

    def __init__(self, prompt: Prompt, sink: Sequence[int], ratio: float) -> None:
        self.ratio = ratio
        self._prompt = prompt
        self._sink = tuple(sink)

    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        """Prefill the prompt. Of the budget, which counts cached tokens, only the ratio is used, as in that code."""
        clock = Clock(blend)
        check = min(CHECK_LAYER, blend.decoder.layers - 1)
        self._encode_parts(blend)
        last = len(blend.token_ids) - 1
        chosen = _deviations(blend, check)[:last].topk(int(last * self.ratio)).indices.sort().values
        rows = torch.cat((chosen, chosen.new_tensor([last])))
        select_ms = clock.lap()
        decoder = under_released_mask(blend.decoder, len(blend.token_ids), check)
        logits = decoder.forward([Rows(blend.canvas, rows, blend.token_ids[rows])])
        held = torch.zeros_like(blend.missing)
        for start, end in blend.chunks:
            held[start:end] = True
        selection = Selection(chosen[held[chosen]], probe=blend.cached * (check + 1))
        return Outcome(passes.unstopped(logits)[0], selection, rows, select_ms, clock.lap())

    def _encode_parts(self, blend: Blend) -> None:
        """Put every part on the canvas that the store has not put there, encoded by itself."""
        decoder, device = blend.decoder, blend.token_ids.device
        loaded = {start for start, _ in blend.chunks}
        pieces: list[Piece] = []
        parts: list[Tensor] = []
        for start, _, segment in self._prompt.spans():
            if start in loaded:
                continue
            before = self._sink if start else ()
            ids = torch.tensor((*before, *segment.token_ids), device=device)
            canvas = decoder.new_canvas(len(ids))
            passes.everything(decoder, canvas, ids, blend.max_rows)
            parts.append(torch.stack((canvas.k, canvas.v), 1)[:, :, :, len(before) :].contiguous())
            pieces.append(Piece(start, len(segment), stored_at=len(before)))
        assembly = Assembly(blend.canvas, pieces, decoder.rotations, decoder.kernels)
        for layer in range(decoder.layers):
            assembly.put(layer, [part[layer] for part in parts])


def under_released_mask(decoder: Decoder, length: int, first: int = 0) -> Decoder:
    """Return the decoder with the released code's mask from layer ``first`` on.

    Its passes take one request of ``length`` positions; of R rows row i reads keys 0 to ``length - R + i``. The mask
    knows no windows.
    """
    own = decoder.kernels.attend
    masks: dict[int, Batch] = {}

    def attend(
        query: Tensor,
        memory: Memory,
        layer: int,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if layer < first:
            return own(query, memory, layer, batch, scale=scale, window=window, softcap=softcap)
        if batch.rows not in masks:
            masks[batch.rows] = Batch([torch.arange(length - batch.rows, length, device=query.device)])
        return own(query, memory, layer, masks[batch.rows], scale=scale, softcap=softcap)

    kernels: Kernels = replace(decoder.kernels, attend=attend)
    return decoder.with_kernels(kernels)


class _Watch(Observer):
    """Takes V's deviation at one layer, and ends each pass once that layer's fresh keys and values are written."""

    def __init__(self, layer: int, blend: Blend) -> None:
        self.layer = layer
        self.deviation = blend.decoder.kernels.deviation
        self.found: list[Tensor] = []

    def before_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Take the deviation while the canvas still holds the cached values."""
        if layer == self.layer:
            self.found.append(self.deviation(value, rows.canvas.v[layer], rows.positions))

    def after_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Leave the layer's fresh keys and values behind."""
        if layer == self.layer:
            raise StopForward


def _deviations(blend: Blend, layer: int) -> Tensor:
    """Run all tokens up to a layer's projections; returns the squared deviation of V ``[N]`` there."""
    watch = _Watch(layer, blend)
    positions = torch.arange(len(blend.token_ids), device=blend.token_ids.device)
    passes.run(blend.decoder, blend.canvas, blend.token_ids, positions, blend.max_rows, observer=watch)
    return torch.cat(watch.found)

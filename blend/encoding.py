"""A chunk's KV as it is stored, and how sensitive its tokens are to what stands before them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from blend.errors import InvalidInput, InvalidPrompt, PromptTooLong
from blend.model.decoder import Decoder
from blend.recompute import passes
from blend.recompute.canvas import Canvas
from blend.recompute.planner import PrefillSpeed
from blend.store import Header
from blend.types import Chunk

CONTEXT = 2
"""Most neighbours that a chunk is encoded behind at a time.

More of them are several contexts, and what is stored is the mean of the chunk's KV behind each (see :func:`contexts`).
Where a chunk will stand it meets other passages than these: what its KV has of single neighbours averages out, and what
it has of all of them stays. A model's fingerprint has this number, so that KV of another one is not taken for it.
"""

_log = logging.getLogger(__name__)


def contexts(behind: Sequence[Chunk]) -> list[Sequence[Chunk]]:
    """Return a chunk's neighbours in contexts of :data:`CONTEXT`, from the end on: the nearest ones are the first.

    Each keeps their order, the nearest last; what is left over is a smaller one. Without neighbours it is one that is
    empty.
    """
    return [behind[max(end - CONTEXT, 0) : end] for end in range(len(behind), 0, -CONTEXT)] or [()]


class Mean:
    """A chunk's KV behind its neighbours, one context after another: the mean over them.

    Values are taken as they are, keys once they are turned to where they stand in the first context. The mean is
    accumulated in float32, in the host's memory, and cast once. Of one context it is what was computed, bit for bit.

    Attributes:
        contexts: what :func:`contexts` returned.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, chunk: Chunk, behind: Sequence[Chunk]) -> None:
        self.contexts = contexts(behind)
        self._encoder = encoder
        self._rotations = decoder.rotations
        self._dtype = decoder.dtype
        self._chunk = chunk
        self._position = encoder.position(behind)
        self._sum: Tensor | None = None

    def prepare(self, context: Sequence[Chunk]) -> tuple[Canvas, Tensor]:
        """Return an empty canvas for the sink, a context and the chunk, and their token ids ``[N]`` int64."""
        return self._encoder.prepare(self._chunk, context)

    def add(self, context: Sequence[Chunk], canvas: Canvas) -> None:
        """Take what was computed behind a context, the first one first, from a canvas with all rows computed."""
        kv = _last(canvas, len(self._chunk))
        if self._sum is None:
            self._sum = kv
            return
        self._sum = self._sum.float()
        shift = self._position - self._encoder.position(context)
        for total, (keys, values), rotation in zip(self._sum, kv, self._rotations, strict=True):
            total[0] += keys if rotation is None else rotation.rotate(keys.float(), shift)
            total[1] += values

    def kv(self) -> Tensor:
        """Return the mean ``[L, 2, KVH, T, D]``, once all contexts were added: on the CPU, contiguous."""
        if self._sum is None:
            raise RuntimeError("a mean was asked for before anything was computed")
        return self._sum if len(self.contexts) == 1 else (self._sum / len(self.contexts)).to(self._dtype)


class Encoder:
    """Computes chunks' KV behind the sink, and behind other chunks as well.

    Args:
        decoder: the model.
        sink: token ids that every chunk is encoded behind.
        speed: learns from the chunks that are encoded how fast full prefill is.
        max_rows: most rows of one forward pass.
    """

    def __init__(self, decoder: Decoder, sink: tuple[int, ...], speed: PrefillSpeed, max_rows: int) -> None:
        self._decoder = decoder
        self._sink = sink
        self._speed = speed
        self._max_rows = max_rows

    def encode(
        self,
        chunk: Chunk,
        behind: Sequence[Chunk],
        plain: Callable[[], Tensor | None],
        mean: Mean | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return a chunk's KV ``[L, 2, KVH, T, D]`` and, behind other chunks, its sensitivity ``[L, T]``.

        Behind other chunks it is the mean over their contexts.

        Shards call this in the same order, and compute what one of them lacks.

        Args:
            plain: returns the KV behind the sink alone where it is stored. It is computed otherwise.
            mean: what :meth:`mean` returned for them, with all contexts added; ``None``: they are computed here.

        Raises:
            InvalidPrompt, PromptTooLong: as :meth:`mean`.
        """
        if mean is None:
            mean = self.mean(chunk, behind)
            for context in mean.contexts:
                mean.add(context, self._computed(chunk, context))
        kv = mean.kv()
        if not behind:
            return kv, None
        stored = plain()
        everywhere = all(self._decoder.shards.everywhere([stored is not None]))
        return kv, sensitivity(kv, stored if stored is not None and everywhere else self.kv(chunk))

    def mean(self, chunk: Chunk, behind: Sequence[Chunk]) -> Mean:
        """Return the mean over the contexts of these neighbours, to which each is still to be added.

        Raises:
            InvalidPrompt: a token id that the model has not got.
            PromptTooLong: the sink, a context and the chunk exceed the model's context.
        """
        for context in contexts(behind):
            self._check(chunk, self.position(context))
        return Mean(self, self._decoder, chunk, behind)

    def position(self, behind: Sequence[Chunk]) -> int:
        """Return where a chunk's first token stands behind these neighbours: behind the first of their contexts."""
        return len(self._sink) + sum(map(len, contexts(behind)[0]))

    def longest_neighbour(self, tokens: int) -> int:
        """Return how many tokens a neighbour of a chunk of so many may have; 0 or less where none fits.

        A whole context of such neighbours fits, whichever of them come together.
        """
        return (self._decoder.max_positions - len(self._sink) - tokens) // CONTEXT

    def kv(self, chunk: Chunk, behind: Sequence[Chunk] = ()) -> Tensor:
        """Return a chunk's KV ``[L, 2, KVH, T, D]`` behind the sink and these chunks, all of them at a time.

        It is on the CPU, and contiguous.

        Raises:
            InvalidPrompt: a token id that the model has not got.
            PromptTooLong: the sink, the other chunks and the chunk exceed the model's context.
        """
        return _last(self._computed(chunk, behind), len(chunk))

    def _computed(self, chunk: Chunk, behind: Sequence[Chunk]) -> Canvas:
        canvas, ids = self.prepare(chunk, behind)
        begin = perf_counter()
        passes.everything(self._decoder, canvas, ids, self._max_rows)
        passes.synchronize(self._decoder.device)
        self._speed.saw(self._speed.flops(range(len(ids))), (perf_counter() - begin) * 1e3)
        return canvas

    def prepare(self, chunk: Chunk, behind: Sequence[Chunk] = ()) -> tuple[Canvas, Tensor]:
        """Return an empty canvas for the sink, the other chunks and the chunk, and their token ids ``[N]`` int64.

        Raises:
            InvalidPrompt, PromptTooLong: as :meth:`kv`.
        """
        before = self._sink + tuple(token for other in behind for token in other.token_ids)
        self._check(chunk, len(before))
        ids = torch.tensor(before + chunk.token_ids, device=self._decoder.device)
        return self._decoder.new_canvas(len(ids)), ids

    def _check(self, chunk: Chunk, before: int) -> None:
        if before + len(chunk) > self._decoder.max_positions:
            raise PromptTooLong(before + len(chunk), self._decoder.max_positions, "chunk")
        if max(chunk.token_ids) >= self._decoder.vocab_size:
            raise InvalidPrompt("chunk", max(chunk.token_ids), f"token ids below {self._decoder.vocab_size}")


def _last(canvas: Canvas, tokens: int) -> Tensor:
    """Return the KV ``[L, 2, KVH, T, D]`` of the last T tokens of a canvas: on the CPU, contiguous."""
    kept = slice(canvas.length - tokens, None)
    return torch.stack((canvas.k[:, :, kept], canvas.v[:, :, kept]), dim=1).contiguous().cpu()


def sensitivity(conditioned: Tensor, plain: Tensor) -> Tensor:
    """Return how far each token's values move when other chunks stand before it: ``[L, T]`` float32.

    That is the norm of their difference, over the heads that are here and the numbers of each.

    Args:
        conditioned, plain: a chunk's KV ``[L, 2, KVH, T, D]`` behind other chunks, the mean over their contexts, and
            behind the sink alone.
    """
    moved = [one.float() - other.float() for one, other in zip(conditioned[:, 1], plain[:, 1], strict=True)]
    return torch.stack([torch.linalg.vector_norm(layer, dim=(0, 2)) for layer in moved])


def with_sensitivity(header: Header, values: Tensor) -> Header:
    """Return the header with a sensitivity ``[L, T]``; without one where they are not numbers, or too many for it."""
    half = values.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)
    try:
        return replace(header, sensitivity=half.numpy().astype("<f2").tobytes())
    except InvalidInput as error:
        _log.warning("%s is stored without its sensitivity: %s", header.key, str(error))
        return header

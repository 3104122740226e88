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

_log = logging.getLogger(__name__)


class Encoder:
    """Computes chunks' KV behind the sink.

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
        canvas: Canvas | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return a chunk's KV ``[L, 2, KVH, T, D]`` and, behind other chunks, its sensitivity ``[L, T]``.

        Shards call this in the same order, and compute what one of them lacks.

        Args:
            plain: returns the KV behind the sink alone where it is stored. It is computed otherwise.
            canvas: what :meth:`prepare` returned for them, with all rows computed; ``None``: they are computed here.

        Raises:
            InvalidPrompt, PromptTooLong: as :meth:`kv`.
        """
        kv = self.kv(chunk, behind) if canvas is None else _last(canvas, len(chunk))
        if not behind:
            return kv, None
        stored = plain()
        everywhere = all(self._decoder.shards.everywhere([stored is not None]))
        return kv, sensitivity(kv, stored if stored is not None and everywhere else self.kv(chunk))

    def kv(self, chunk: Chunk, behind: Sequence[Chunk] = ()) -> Tensor:
        """Return a chunk's KV ``[L, 2, KVH, T, D]`` behind the sink and these chunks: on the CPU, contiguous.

        Raises:
            InvalidPrompt: a token id that the model has not got.
            PromptTooLong: the sink, the other chunks and the chunk exceed the model's context.
        """
        canvas, ids = self.prepare(chunk, behind)
        begin = perf_counter()
        passes.everything(self._decoder, canvas, ids, self._max_rows)
        passes.synchronize(self._decoder.device)
        self._speed.saw(self._speed.flops(range(len(ids))), (perf_counter() - begin) * 1e3)
        return _last(canvas, len(chunk))

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
        conditioned, plain: a chunk's KV ``[L, 2, KVH, T, D]`` behind other chunks, and behind the sink alone.
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

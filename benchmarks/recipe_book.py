"""The recipes of ``recipes.py``, and the bench that they are carried out on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from blend import Chunk, Engine, Plan, Prefill, Prompt
from blend.encoding import Encoder as ChunkEncoder
from blend.eval import fidelity
from blend.eval.metrics import kl_rows, top1_rows
from blend.model.rows import LayerAttention, Observer, Rows
from blend.recompute import passes
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.budget import Budget
from blend.recompute.canvas import Canvas
from blend.recompute.correct import Correcting, Correction, Moves, correction
from blend.recompute.planner import PrefillSpeed
from blend.recompute.select import Blend, selector

MOST_NEIGHBOURS = 6
DEVIATION, REUSE = "deviation, plain", "reuse, plain"
Way: TypeAlias = tuple[str, ...]
"""How chunks are stored: the mean of these contexts, each behind the sink and what :meth:`Encoder.behind` says."""
PLAIN: Way = ("plain",)
KEPT: Way = ("1st and 2nd", "3rd and 4th", "5th and 6th")
HEADS = 8
"""Of each chunk's tokens go first, unless a recipe says otherwise."""
_ROWS = 4096


@dataclass(frozen=True)
class Loss:
    """KL(full ‖ recipe) of the first token and along the answer, in nats, top-1 agreement, charged share."""

    first: float
    answer: float
    top1: float
    charged: float


class Encoder:
    """Chunks' KV ``[L, 2, KVH, T, D]`` behind what a way of storing says, each computed once.

    Args:
        engine: with the model.
        near: for each chunk its nearest ones, the nearest last.
    """

    def __init__(self, engine: Engine, near: Mapping[Chunk, Sequence[Chunk]]) -> None:
        self.engine = engine
        self._near = near
        self._made: dict[tuple[Chunk, tuple[Chunk, ...]], Tensor] = {}
        self._encoder = ChunkEncoder(engine.decoder, engine.sink, PrefillSpeed(engine.decoder), _ROWS)

    def behind(self, chunk: Chunk, context: str) -> tuple[Chunk, ...]:
        """Return the chunks that it is encoded behind."""
        near = tuple(self._near[chunk])
        return {
            "plain": (),
            "nearest": near[-1:],
            "3 nearest": near[-3:],
            "6 nearest": near,
            "next 3": near[:-3],
            "1st and 2nd": near[-2:],
            "3rd and 4th": near[-4:-2],
            "5th and 6th": near[:-4],
        }[context]

    def kv(self, chunk: Chunk, context: str) -> tuple[Tensor, int]:
        """Return the KV and the position that its first token was computed at."""
        others = self.behind(chunk, context)
        if (chunk, others) not in self._made:
            self._made[chunk, others] = self._encoder.kv(chunk, others)
        return self._made[chunk, others], len(self.engine.sink) + sum(map(len, others))


class _Masses(Observer):
    """The attention mass of rows from a position on, by layer: ``[L, N]``."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.found: list[Tensor] = []

    def after_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Add this layer's."""
        counted = rows.positions >= self.start
        self.found.append(self._mass(query[:, counted], rows, layer, rows.positions[counted], attention))

    def _mass(self, query: Tensor, rows: Rows, layer: int, positions: Tensor, attention: LayerAttention) -> Tensor:
        key = rows.canvas.k[layer].repeat_interleave(len(query) // len(rows.canvas.k[layer]), 0)
        scores = torch.einsum("hrd,hnd->hrn", query.float(), key.float()) * attention.scale
        later = torch.arange(key.shape[1])[None] > positions[:, None]
        return scores.masked_fill(later[None], -math.inf).softmax(-1).sum((0, 1))


class _KeysAlone(Correcting):
    """Moves no values."""

    def _apply(self, layer: int, canvas: Canvas) -> None:
        held = canvas.v[layer].clone()
        super()._apply(layer, canvas)
        canvas.v[layer].copy_(held)


class _Alike(Moves):
    """Moves of rows that all count alike."""

    @staticmethod
    def weigh(moves: Tensor) -> Tensor:
        """Return ``[KVH, R]`` ones."""
        return torch.ones(moves.shape[:2], device=moves.device)


class _Early(Observer):
    """Rows at some positions keep their stored KV from a layer on: as if they stopped there."""

    def __init__(self, positions: Tensor, first: int) -> None:
        self.positions = positions
        self.first = first
        self._old: tuple[Tensor, Tensor] | None = None

    def before_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Keep what is stored."""
        if layer >= self.first:
            k, v = rows.canvas.k[layer], rows.canvas.v[layer]
            self._old = k[:, self.positions].clone(), v[:, self.positions].clone()

    def after_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> None:
        """Put it back."""
        if self._old is not None:
            rows.canvas.k[layer][:, self.positions], rows.canvas.v[layer][:, self.positions] = self._old
            self._old = None


@dataclass
class Bench:
    """One prompt, its full prefill, and its chunks as they may have been stored.

    Args:
        encoder: of chunks.
        prompt: chunks between a header and the question.
        cap: most that is charged, as a share of the cached token-layers.
        new_tokens: most tokens of full prefill's answer.
    """

    encoder: Encoder
    prompt: Prompt
    cap: float
    new_tokens: int
    spans: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        engine = self.engine
        self.full = engine.prefill(self.prompt, Plan("full"), reserve=self.new_tokens)
        question = self.prompt.segments[-1].token_ids
        self.measure = fidelity.full_prefill(engine, self.full, question, self.new_tokens, attention=False)
        self.ids = torch.tensor(self.prompt.token_ids)
        self.spans = [(start, start + len(part)) for start, part in self.prompt.parts()]
        self.text = torch.ones(len(self.ids), dtype=torch.bool)
        for start, end in self.spans:
            self.text[start:end] = False
        self.cached = int((~self.text).sum())
        self.layers = engine.decoder.layers
        self.probe_rows = len(self.ids) - self.spans[-1][1]
        self.rows = max(0, int(self.cap * self.cached) - self.probe_rows)
        self._held: dict[str, Canvas] = {}
        self._masses: dict[Way, Tensor] = {}

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self.encoder.engine

    def empty(self) -> Canvas:
        """Return a canvas with room for the prompt and the answer."""
        return self.engine.decoder.new_canvas(len(self.ids) + self.new_tokens)

    def canvas(self, stored: Way) -> Canvas:
        """Return a canvas with the chunks' KV stored in this way."""
        for context in stored:
            if context not in self._held:
                self._held[context] = self._filled(context)
        made = self.empty()
        made.k.copy_(torch.stack([self._held[context].k for context in stored]).mean(0))
        made.v.copy_(torch.stack([self._held[context].v for context in stored]).mean(0))
        return made

    def _filled(self, context: str) -> Canvas:
        decoder, made = self.engine.decoder, self.empty()
        found = [self.encoder.kv(part.chunk, context) for _, part in self.prompt.parts()]
        pieces = [Piece(start, end - start, at) for (start, end), (_, at) in zip(self.spans, found, strict=True)]
        assembly = Assembly(made, pieces, decoder.rotations, decoder.kernels)
        for layer in range(self.layers):
            assembly.put(layer, [kv[layer] for kv, _ in found])
        return made

    def blend(self, canvas: Canvas) -> Blend:
        """Return what the engine's own selectors are given."""
        nothing = torch.zeros_like(self.text)
        question = (self.spans[-1][1], len(self.ids))
        decoder, spans = self.engine.decoder, tuple(self.spans)
        return Blend(decoder, canvas, self.ids, spans, ~self.text, nothing, self.text.clone(), question, _ROWS)

    def probe(self, canvas: Canvas, rows: Tensor | None = None, start: int | None = None) -> Tensor:
        """Return the attention mass ``[L, N]`` of the rows from ``start`` on, by default of the question."""
        masses = _Masses(self.spans[-1][1] if start is None else start)
        positions = (self.text if rows is None else rows).nonzero().squeeze(1)
        passes.run(self.engine.decoder, canvas, self.ids, positions, _ROWS, observer=masses)
        return torch.stack(masses.found)[:, : len(self.ids)]

    def mass(self, stored: Way) -> Tensor:
        """Return the question's mass ``[L, N]`` over chunks stored in this way."""
        if stored not in self._masses:
            self._masses[stored] = self.probe(self.canvas(stored))
        return self._masses[stored]

    def moved(self, stored: Way) -> Tensor:
        """Return how far values are from where they are behind the sink alone, ``[L, N]``; 0 outside of chunks."""
        one, two = (self.canvas(way).v[:, :, : len(self.ids)] for way in (stored, PLAIN))
        return (one - two).pow(2).sum((1, 3)).sqrt().masked_fill(self.text, 0.0)

    def weighted(self, stored: Way) -> Tensor:
        """Return what ``query`` scores tokens by, ``[N]``: attention × sensitivity in all but the first layers."""
        return (self.mass(stored) * self.moved(stored))[self.layers // 4 :].sum(0)

    def best(self, score: Tensor, rows: int, heads: int = HEADS) -> Tensor:
        """Return the positions of the ``rows`` best cached tokens, the chunks' first ``heads`` before all others."""
        score = score.masked_fill(self.text, -math.inf)
        for start, end in self.spans:
            score[start : min(end, start + heads)] = math.inf
        return score.topk(min(rows, self.cached)).indices.sort().values

    def loss(self, canvas: Canvas, chosen: Tensor, probe: float, observer: Observer | None = None) -> Loss:
        """Compute the chosen tokens and the text; ``probe`` is what else is charged, in token-layers."""
        rows = self.text.clone()
        rows[chosen] = True
        positions = rows.nonzero().squeeze(1)
        logits = passes.unstopped(
            passes.run(self.engine.decoder, canvas, self.ids, positions, _ROWS, observer=observer)
        )
        logs = self.engine.continuation(Prefill(logits, canvas, self.full.report), self.measure.forced)
        kl, top1 = kl_rows(self.measure.logs, logs), top1_rows(self.measure.logs, logs)
        charged = (probe + len(chosen) * self.layers) / (self.layers * self.cached)
        return Loss(float(kl[0]), float(kl.mean()), float(top1.float().mean()), charged)

    def correction(
        self, chosen: Tensor, heads: int = HEADS, observer: Callable[[Correction], Observer] = Correcting
    ) -> Observer | None:
        """Return what moves the KV of all others, as the engine does."""
        question = self.spans[-1][1]
        decoder = self.engine.decoder
        found = correction(decoder.rotations, tuple(self.spans), ~self.text, chosen, question, heads, decoder.kernels)
        return None if found is None else observer(found)

    def chosen(self, stored: Way, score: Tensor, heads: int = HEADS) -> Loss:
        """Return the loss of what a score over the question's attention chooses, the question charged for it."""
        chosen = self.best(score, self.rows, heads)
        return self.loss(self.canvas(stored), chosen, self.probe_rows * self.layers, self.correction(chosen, heads))


def baselines(bench: Bench) -> Iterator[tuple[str, Loss]]:
    """What all is compared with."""
    nothing = torch.zeros(0, dtype=torch.int64)
    yield REUSE, bench.loss(bench.canvas(PLAIN), nothing, 0)
    deviation = selector("deviation")
    assert deviation is not None
    canvas = bench.canvas(PLAIN)
    probe = deviation.probe_cost(bench.blend(canvas))
    rows = max(0, int(bench.cap * bench.cached - probe / bench.layers))
    found = deviation.select(bench.blend(canvas), Budget(bench.layers, bench.cached, rows / bench.cached))
    yield DEVIATION, bench.loss(bench.canvas(PLAIN), found.positions, probe)


def scores(bench: Bench) -> Iterator[tuple[str, Loss]]:
    """What a token's score is made of."""
    mass, moved = bench.mass(KEPT), bench.moved(KEPT)
    weighted, first = mass * moved, bench.layers // 4
    yield "attention", bench.chosen(KEPT, mass.sum(0))
    yield "attention × sensitivity", bench.chosen(KEPT, weighted.sum(0))
    yield "the same, without the first quarter of the layers (kept)", bench.chosen(KEPT, bench.weighted(KEPT))
    yield "attention × mean sensitivity", bench.chosen(KEPT, mass.sum(0) * moved.mean(0))
    yield "square root of attention × sensitivity", bench.chosen(KEPT, weighted.sqrt().sum(0))
    yield "each layer's sum 1", bench.chosen(KEPT, (weighted / weighted.sum(1, keepdim=True)).sum(0))
    yield "middle third of the layers", bench.chosen(KEPT, weighted[bench.layers // 3 : 2 * bench.layers // 3].sum(0))
    smooth = torch.nn.functional.avg_pool1d(weighted[first:].sum(0)[None], 3, 1, 1)[0]
    yield "smoothed over 3 tokens", bench.chosen(KEPT, smooth)
    half = bench.layers // 2
    rows = max(0, int(bench.cap * bench.cached - bench.probe_rows * half / bench.layers))
    chosen = bench.best(weighted[first:half].sum(0), rows)
    lost = bench.loss(bench.canvas(KEPT), chosen, bench.probe_rows * half, bench.correction(chosen))
    yield "first half of the layers, the rest saved", lost


def heads(bench: Bench) -> Iterator[tuple[str, Loss]]:
    """How many of each chunk's first tokens go before all others, and show and make no move."""
    for count in (0, 2, 4, 8, 12, 16):
        yield f"{count} heads{' (kept)' if count == HEADS else ''}", bench.chosen(KEPT, bench.weighted(KEPT), count)


def stored(bench: Bench) -> Iterator[tuple[str, Loss]]:
    """What chunks are encoded behind: reused as they are, and with the best tokens computed again."""
    nothing = torch.zeros(0, dtype=torch.int64)
    yield "plain, by attention alone", bench.chosen(PLAIN, bench.mass(PLAIN)[bench.layers // 4 :].sum(0))
    ways = {
        "nearest": ("nearest",),
        "3 nearest": ("3 nearest",),
        "6 nearest": ("6 nearest",),
        "mean of two threes": ("3 nearest", "next 3"),
        "mean of two twos": KEPT[:2],
        "mean of three twos (kept)": KEPT,
    }
    for name, way in ways.items():
        yield f"{name}: reuse", bench.loss(bench.canvas(way), nothing, 0)
        yield f"{name}: chosen", bench.chosen(way, bench.weighted(way))


def after(bench: Bench) -> Iterator[tuple[str, Loss]]:
    """What else is done, and what an oracle would choose."""
    weighted, probe = bench.weighted(KEPT), bench.probe_rows * bench.layers
    chosen = bench.best(weighted, bench.rows)
    yield "nothing is moved", bench.loss(bench.canvas(KEPT), chosen, probe)
    keys = bench.correction(chosen, observer=_KeysAlone)
    yield "keys alone are moved", bench.loss(bench.canvas(KEPT), chosen, probe, keys)
    alike = bench.correction(chosen, observer=lambda found: Correcting(replace(found, moves=_Alike)))
    yield "all that shows a move counts alike", bench.loss(bench.canvas(KEPT), chosen, probe, alike)
    yield "keys and values are moved (kept)", bench.chosen(KEPT, weighted)
    twice = max(0, bench.rows - bench.probe_rows)
    first = bench.best(weighted, twice // 2)
    canvas, rows = bench.canvas(KEPT), bench.text.clone()
    rows[first] = True
    again = (bench.probe(canvas, rows) * bench.moved(KEPT))[bench.layers // 4 :].sum(0)
    again[first] = math.inf
    yield "two stages, the second charged, nothing moved", bench.loss(canvas, bench.best(again, twice), 2 * probe)
    for layer, rows_through, rows_early in ((bench.layers // 2, 0.5, 1.0), (2 * bench.layers // 3, 0.5, 0.75)):
        through, early = int(bench.rows * rows_through), int(bench.rows * rows_early)
        wide, narrow = bench.best(weighted, through + early), bench.best(weighted, through)
        stopping = wide[~torch.isin(wide, narrow)]
        charged = probe - len(stopping) * (bench.layers - layer)
        lost = bench.loss(bench.canvas(KEPT), wide, charged, _Early(stopping, layer))
        yield f"half of the rows stop at layer {layer}, nothing moved", lost
    fresh, held = bench.full.canvas.v[:, :, : len(bench.ids)], bench.canvas(KEPT).v[:, :, : len(bench.ids)]
    true = (fresh - held).pow(2).sum((1, 3)).sqrt()
    yield "oracle: attention × true move", bench.chosen(KEPT, (bench.mass(KEPT) * true).sum(0))
    exact = bench.empty()
    exact.k.copy_(bench.full.canvas.k)
    exact.v.copy_(bench.full.canvas.v)
    yield "oracle: full attention × true move", bench.chosen(KEPT, (bench.probe(exact) * true).sum(0))

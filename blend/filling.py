"""One request's chunks on their way from the store to its canvas: found, waited for, placed layer by layer."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from types import TracebackType
from typing import Literal

import torch

from blend.errors import ResourceExhausted, StoreError
from blend.helper import Helper
from blend.model.shards import ELSEWHERE, Shards
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import Kernels
from blend.recompute.rope import Rotation
from blend.store import Header, Lease, LoadingLease, ObjectKey, TieredStore
from blend.types import Chunk, ChunkReport, Part, Phase

with warnings.catch_warnings():
    # Leases hand out read-only memory, and nothing here writes to it. torch warns of that once in a process: now.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

_LAYER_SECONDS = 2.0
"""Longest wait for one layer once work has begun, for others wait then too. They come a few megabytes of an object at a
time, so that what takes longer is not slow but has stopped."""

Lost = Mapping[ObjectKey, str]
"""Objects that were lost while a request was computed from them, and why: absent when it is planned again."""


class ChunkLost(Exception):
    """A chunk that work had begun with could not be read to its end. The request has to be planned again.

    Attributes:
        wanted: the object.
        reason: what failed.
    """

    def __init__(self, wanted: ObjectKey, reason: str) -> None:
        super().__init__(f"{wanted} was lost while it was loaded: {reason}")
        self.wanted = wanted
        self.reason = reason


@dataclass(frozen=True)
class Place:
    """A chunk, or a part of one, in a prompt, and what is asked of the store for it.

    ``start`` is its position; ``key`` the chunk's content key; ``exact`` whether it stands behind the very context it
    was encoded behind; ``wanted`` the object to load, if any; ``outcome`` and ``reason`` say why none is.
    """

    part: Part
    start: int
    key: str
    exact: bool
    wanted: ObjectKey | None
    outcome: Literal["unused", "miss", "failed"] = "unused"
    reason: str = ""

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + len(self.part)


@dataclass
class Loaded:
    """What a load puts on the canvas.

    ``chunks`` are the spans that hold KV, ``exact`` those of them whose KV needs no repair, ``missing`` the
    spans of chunks that hold none. ``sensitivities`` has for each of ``chunks`` that of its tokens, ``[L, T]`` float16
    on the CPU, where it is stored. Times are in milliseconds; ``fetch_ms`` is what was waited for bytes. ``phases``
    are the same times in detail.
    """

    reports: list[ChunkReport] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    exact: list[tuple[int, int]] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    sensitivities: list[torch.Tensor | None] = field(default_factory=list)
    lookup_ms: float = 0.0
    fetch_ms: float = 0.0
    rotate_ms: float = 0.0
    phases: list[Phase] = field(default_factory=list)

    def unused(self) -> Loaded:
        """Return what this load comes to when all of it is computed after all: every chunk is a span without KV."""
        reports = [replace(r, outcome="unused", nbytes=0) if r.outcome == "hit" else r for r in self.reports]
        spans = [(r.start, r.start + r.tokens) for r in self.reports]
        return replace(self, reports=reports, chunks=[], exact=[], missing=spans, sensitivities=[])


class _Source:
    """One stored object, read layer by layer: a view where it is in memory, as it comes where it is being loaded."""

    def __init__(self, lease: Lease, dtype: torch.dtype) -> None:
        header = lease.header
        self.wanted = header.key
        self._shape = (2, header.kv_heads, header.tokens, header.head_dim)
        self._dtype = dtype
        self._loading = lease if isinstance(lease, LoadingLease) else None
        # Views outlive their lease; reading through it would fail once its time is up.
        whole = self._loading is None
        self._layers = self._tensor(lease.payload(), header.layers).unbind() if whole else ()

    def layer(self, layer: int) -> torch.Tensor:
        """Return ``[2, KVH, T, D]``; raises :class:`ChunkLost`."""
        if self._loading is None:
            return self._layers[layer]
        try:
            self._loading.deadline = monotonic() + _LAYER_SECONDS
            return self._tensor(self._loading.layer(layer), 1)[0]
        except (StoreError, ResourceExhausted) as error:
            raise ChunkLost(self.wanted, str(error)) from None

    def arrived(self, layer: int) -> bool:
        """Return whether a layer can be read without waiting."""
        return self._loading is None or self._loading.wait(monotonic(), layer + 1)

    def _tensor(self, raw: memoryview, layers: int) -> torch.Tensor:
        return torch.frombuffer(raw, dtype=self._dtype).view(layers, *self._shape)


class Filling:
    """The chunks of one request, from look-up to canvas. A context manager: leaving it lets go of all of them.

    What is not in the fastest tier begins to load at once. In this order: :meth:`wait`, which may take its time and
    holds nobody else up; :meth:`settle`, which says what there is; :meth:`onto`, after which the canvas takes each
    layer when a pass first needs it, while later ones are still being read.

    Args:
        places: the prompt's chunks.
        store: where they are.
        wrong: why a stored object is not the chunk it was asked for, or an empty string.
        rotations: one for each layer of the model.
        dtype: of the model's KV.
        kernels: what chunks are placed with.
        helper: a thread that takes part in it.
        shards: those who share the model's heads. A chunk is there if it is there for all of them.
        last: position of the prompt's last token, which is never taken from the store, for its logits are wanted.
        begun: when looking up began, a reading of :func:`time.perf_counter`.
    """

    def __init__(
        self,
        places: Sequence[Place],
        store: TieredStore,
        wrong: Callable[[Header, Chunk], str],
        rotations: Sequence[Rotation | None],
        dtype: torch.dtype,
        kernels: Kernels,
        helper: Helper,
        shards: Shards,
        last: int,
        begun: float,
    ) -> None:
        self._places = tuple(places)
        chunks = defaultdict[ObjectKey, list[Chunk]](list)
        for place in places:
            if place.wanted is not None:
                chunks[place.wanted].append(place.part.chunk)
        self._rotations = rotations
        self._dtype = dtype
        self._kernels = kernels
        self._helper = helper
        self._shards = shards
        self._last = last
        self._patient = store.policy.prefetch != "best_effort"
        tokens = sum(len(place.part) for place in places if place.wanted is not None)
        self._loads = store.load(
            chunks,
            tokens,
            lambda header: next(filter(None, (wrong(header, chunk) for chunk in chunks[header.key])), ""),
        )
        self._sources: dict[ObjectKey, _Source] = {}
        self._faults: dict[ObjectKey, str] = {}
        now = perf_counter()
        self._loaded = Loaded(lookup_ms=(now - begun) * 1e3, phases=[Phase("lookup", begun, now)])
        self._assembly: Assembly | None = None

    def wait(self, whole: bool = False) -> None:
        """Wait for the store as long as its prefetch policy says. To be called without holding anybody else up.

        With ``whole``, not for the first layers alone but for all of them.
        """
        begin = perf_counter()
        if self._patient:
            self._loads.settle() if whole else self._loads.begin()
        for wanted, lease in self._loads.items():
            if not isinstance(lease, LoadingLease):
                self._read(wanted, lease)
        now = perf_counter()
        self._loaded.fetch_ms += (now - begin) * 1e3
        self._loaded.phases.append(Phase("fetch", begin, now))

    def _read(self, wanted: ObjectKey, lease: Lease) -> None:
        if wanted in self._sources or wanted in self._faults:
            return
        try:
            self._sources[wanted] = _Source(lease, self._dtype)
        except (StoreError, ResourceExhausted) as error:
            self._faults[wanted] = str(error)

    def settle(self) -> Loaded:
        """Return what there is: which chunks the canvas will hold and which have to be computed. Waits for nothing."""
        self._loads.begin()  # what has failed since, or does not count if it is late, is dropped
        loaded, seen = self._loaded, set[ObjectKey]()
        found = [self._report(place) for place in self._places]
        hits = [report.outcome == "hit" for report in found]
        known = [self._sensitivity(place) if hit else None for place, hit in zip(self._places, hits, strict=True)]
        agreed = self._shards.everywhere([*hits, *(own is not None for own in known)])
        everywhere, told = agreed[: len(hits)], agreed[len(hits) :]
        for place, report, held, own, all_know in zip(self._places, found, everywhere, known, told, strict=True):
            if report.outcome == "hit" and not held:
                report = ChunkReport(place.key, place.start, len(place.part), "miss", reason=ELSEWHERE)
            repeated = place.wanted in seen
            loaded.reports.append(replace(report, nbytes=0) if repeated else report)
            if report.outcome != "hit":
                loaded.missing.append((place.start, place.end))
                continue
            assert place.wanted is not None
            seen.add(place.wanted)
            span = (place.start, min(place.end, self._last))
            if span[0] < span[1]:
                loaded.chunks.append(span)
                loaded.sensitivities.append(own[..., : span[1] - span[0]] if own is not None and all_know else None)
                if place.exact and report.variant == "plain":
                    loaded.exact.append(span)
        return loaded

    def _report(self, place: Place) -> ChunkReport:
        wanted = place.wanted
        report = ChunkReport(place.key, place.start, len(place.part), place.outcome, reason=place.reason)
        if wanted is None:
            return report
        lease = self._loads.get(wanted)
        if lease is None:
            reason = self._loads.missed[wanted]
            outcome: Literal["miss", "failed"] = "failed" if reason and wanted not in self._loads.late else "miss"
            return replace(report, outcome=outcome, reason=reason or "not stored")
        self._read(wanted, lease)
        report = replace(report, tier=lease.tier)
        if fault := self._faults.get(wanted):
            return replace(report, outcome="failed", reason=fault)
        return replace(report, outcome="hit", variant=wanted.variant, nbytes=lease.header.payload_nbytes)

    def _sensitivity(self, place: Place) -> torch.Tensor | None:
        """Return that of the tokens to be placed, ``[L, T]``, if it is stored with the chunk."""
        assert place.wanted is not None
        header = self._loads[place.wanted].header
        if not header.sensitivity:
            return None
        whole = torch.frombuffer(header.sensitivity, dtype=torch.float16).view(header.sensitivity_shape)
        return whole[..., place.part.first : place.part.end]

    def onto(self, canvas: Canvas) -> None:
        """Have the canvas filled, each layer when it is first needed. Then a pass may raise :class:`ChunkLost`."""
        hits = [
            (place, self._sources[place.wanted])
            for place, report in zip(self._places, self._loaded.reports, strict=True)
            if report.outcome == "hit" and place.wanted is not None and place.start < self._last
        ]
        if not hits:
            return
        pieces = [
            Piece(
                place.start,
                min(place.end, self._last) - place.start,
                self._loads[source.wanted].header.position,
                place.part.first,
            )
            for place, source in hits
        ]
        assembly = Assembly(canvas, pieces, self._rotations, self._kernels, self._helper)
        self._assembly = assembly
        loaded, sources, layers = self._loaded, [source for _, source in hits], canvas.layers

        def fill(layer: int) -> None:
            begin = perf_counter()
            kv = self._layer(layer, sources)
            fetched = perf_counter()
            assembly.put(layer, kv)
            following = layer + 1
            if assembly.copies and following < layers and all(s.arrived(following) for s in sources):
                assembly.ahead(following, [source.layer(following) for source in sources])
            placed = perf_counter()
            loaded.fetch_ms += (fetched - begin) * 1e3
            loaded.rotate_ms += (placed - fetched) * 1e3
            loaded.phases += (Phase("fetch", begin, fetched, layer), Phase("rotate", fetched, placed, layer))

        canvas.fill_by(fill)

    def _layer(self, layer: int, sources: Sequence[_Source]) -> list[torch.Tensor]:
        """Return a layer of each object; raises :class:`ChunkLost`, on all shards for the same chunk."""
        kv: list[torch.Tensor] = []
        fault = None
        try:
            kv = [source.layer(layer) for source in sources]
        except ChunkLost as error:
            fault = error
        there = self._shards.everywhere([fault is None or fault.wanted != source.wanted for source in sources])
        if not all(there):
            lost = sources[there.index(False)].wanted
            raise ChunkLost(lost, fault.reason if fault is not None and fault.wanted == lost else ELSEWHERE)
        return kv

    def close(self) -> None:
        """Let go of everything; what has not been read by now is not read any more. Safe to call again.

        What is being copied from the store's memory to a device is waited for first.
        """
        assembly, self._assembly = self._assembly, None
        try:
            if assembly is not None:
                assembly.close()
        finally:
            self._sources.clear()
            self._loads.close()

    def __enter__(self) -> Filling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Chunks of one model in the store: encode them, look them up, load them onto a canvas, forget them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

import torch

from blend.errors import InvalidInput, InvalidPrompt, PromptTooLong, StoreError
from blend.model.decoder import Decoder
from blend.recompute import passes
from blend.recompute.assemble import place
from blend.recompute.canvas import Canvas
from blend.recompute.planner import PrefillSpeed
from blend.store import (
    Header,
    Lease,
    Namespace,
    ObjectKey,
    TieredStore,
    conditioned_variant,
    content_key,
    new_generation,
)
from blend.types import Chunk, ChunkReport, Prompt, Variant

Which = Literal["none", "exact", "all"]

with warnings.catch_warnings():
    # Leases hand out read-only memory, and nothing here writes to it. torch warns of that once in a process: now.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass
class Loaded:
    """What a load put on the canvas.

    ``chunks`` are the spans that hold KV, ``exact`` those of them whose KV needs no repair, ``missing`` the
    spans of chunks that hold none. Times are in milliseconds.
    """

    reports: list[ChunkReport] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    exact: list[tuple[int, int]] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    lookup_ms: float = 0.0
    fetch_ms: float = 0.0
    rotate_ms: float = 0.0

    def unused(self) -> Loaded:
        """Return what this load comes to when all of it is computed after all: every chunk is a span without KV."""
        reports = [replace(r, outcome="unused") if r.outcome == "hit" else r for r in self.reports]
        spans = [(r.start, r.start + r.tokens) for r in self.reports]
        return replace(self, reports=reports, chunks=[], exact=[], missing=spans)


class ChunkCache:
    """Encodes chunks behind the sink and keeps them in the store, under keys that name everything they depend on.

    Args:
        decoder: the model.
        sink: token ids that every chunk is encoded behind.
        store: the tiered store.
        fingerprint: hex digest of all that a model's KV depends on.
        secret: the store's secret; each namespace derives its own key from it.
        speed: learns from the chunks that are encoded how fast full prefill is.
        max_rows: most rows of one forward pass.
    """

    def __init__(
        self,
        decoder: Decoder,
        sink: tuple[int, ...],
        store: TieredStore,
        fingerprint: str,
        secret: bytes,
        speed: PrefillSpeed,
        max_rows: int,
    ) -> None:
        self.decoder = decoder
        self.sink = sink
        self.store = store
        self._fingerprint = fingerprint
        self._secret = secret
        self._speed = speed
        self._max_rows = max_rows
        self._generation = new_generation()
        self._dtype = str(decoder.dtype).removeprefix("torch.")

    def namespace(self, tenant: str) -> Namespace:
        """Return the namespace of a tenant for this model.

        Raises:
            InvalidInput: not a usable name.
        """
        if not isinstance(tenant, str) or not 1 <= len(tenant) <= 128:
            raise InvalidInput("namespace", tenant, "a name of 1 to 128 characters")
        return Namespace(tenant, self._fingerprint, self._secret)

    def key(self, chunk: Chunk, tenant: str) -> str:
        """Return the chunk's content key in a tenant's namespace."""
        return content_key(self.namespace(tenant), chunk.token_ids)

    def has(self, chunk: Chunk, tenant: str) -> bool:
        """Return whether the plain variant seems to be stored. A hint: only a load knows."""
        return self.store.contains(ObjectKey(self.key(chunk, tenant), "plain"))

    def encode(self, chunk: Chunk, tenant: str, behind: Sequence[Chunk] = ()) -> bool:
        """Compute a chunk's KV behind the sink (and behind related chunks) and store it.

        Returns False, with nothing computed, when that variant is stored already.

        Raises:
            PromptTooLong: the sink, the related chunks and the chunk exceed the model's context.
            StoreError, ResourceExhausted: no tier took it.
        """
        key = self.key(chunk, tenant)
        neighbours = tuple(self.key(other, tenant) for other in behind)
        object_key = ObjectKey(key, conditioned_variant(neighbours) if neighbours else "plain")
        if self.store.contains(object_key):
            return False
        before = self.sink + tuple(t for other in behind for t in other.token_ids)
        self._check(chunk, len(before))
        payload = self._compute(before, chunk)
        header = Header(
            namespace=self.namespace(tenant).digest,
            key=object_key,
            token_ids=chunk.token_ids,
            layers=self.decoder.layers,
            kv_heads=self.decoder.kv_heads,
            head_dim=self.decoder.head_dim,
            dtype=self._dtype,
            position=len(before),
            neighbours=neighbours,
            generation=self._generation,
        )
        raw = memoryview(payload.view(torch.uint8).numpy()).cast("B")
        self.store.put(header.sealed(raw), raw)
        return True

    def _check(self, chunk: Chunk, before: int) -> None:
        if before + len(chunk) > self.decoder.max_positions:
            raise PromptTooLong(before + len(chunk), self.decoder.max_positions, "chunk")
        if max(chunk.token_ids) >= self.decoder.vocab_size:
            raise InvalidPrompt("chunk", max(chunk.token_ids), f"token ids below {self.decoder.vocab_size}")

    def _compute(self, before: tuple[int, ...], chunk: Chunk) -> torch.Tensor:
        """Return the chunk's KV ``[L, 2, KVH, T, D]`` on the CPU, contiguous."""
        device = self.decoder.device
        ids = torch.tensor(before + chunk.token_ids, device=device)
        canvas = self.decoder.new_canvas(len(ids))
        begin = perf_counter()
        passes.everything(self.decoder, canvas, ids, self._max_rows)
        passes.synchronize(device)
        self._speed.saw(self._speed.flops(range(len(ids))), (perf_counter() - begin) * 1e3)
        kept = slice(len(before), None)
        return torch.stack((canvas.k[:, :, kept], canvas.v[:, :, kept]), dim=1).contiguous().cpu()

    def load(self, prompt: Prompt, canvas: Canvas, tenant: str, variant: Variant, which: Which) -> Loaded:
        """Load the prompt's chunks onto the canvas: all of them, those that are exact where they stand, or none.

        A chunk is exact where its left context is the very one it was encoded behind. A chunk that is not
        stored, or whose bytes fail in any tier, is reported and left to be computed; it costs no other chunk.
        The prompt's last token is never taken from the store, for its logits are wanted.
        """
        loaded = Loaded()
        ids = prompt.token_ids
        last = len(ids) - 1
        with ExitStack() as pins:
            leases: dict[tuple[str, Variant], tuple[Lease | None, ChunkReport]] = {}
            for start, end, segment in prompt.spans():
                if not isinstance(segment, Chunk):
                    continue
                exact = ids[:start] == self.sink
                key = self.key(segment, tenant)
                if which == "none" or (which == "exact" and not exact):
                    loaded.reports.append(ChunkReport(key, start, len(segment), "unused"))
                    loaded.missing.append((start, end))
                    continue
                wanted: Variant = "plain" if exact else variant
                first = (key, wanted) not in leases
                if first:
                    leases[key, wanted] = self._pin(segment, key, tenant, wanted, pins, loaded)
                lease, report = leases[key, wanted]
                report = replace(report, start=start)
                if lease is not None:
                    report = self._place(lease, report, canvas, min(end, last) - start, loaded)
                loaded.reports.append(report if first else replace(report, nbytes=0))
                if report.outcome != "hit":
                    loaded.missing.append((start, end))
                    continue
                span = (start, min(end, last))
                if span[0] < span[1]:
                    loaded.chunks.append(span)
                    if exact and report.variant == "plain":
                        loaded.exact.append(span)
        return loaded

    def _pin(
        self, chunk: Chunk, key: str, tenant: str, variant: Variant, pins: ExitStack, loaded: Loaded
    ) -> tuple[Lease | None, ChunkReport]:
        begin = perf_counter()
        report = ChunkReport(key, 0, len(chunk), "miss", reason="not stored")
        try:
            object_key = self.store.resolve(key, variant)
            if object_key is None:
                return None, report
            found = self.store.lookup(object_key)
            if found.lease is None:
                outcome: Literal["miss", "failed"] = "failed" if found.reason else "miss"
                return None, replace(report, outcome=outcome, reason=found.reason or "not stored")
            lease = pins.enter_context(found.lease)
            if wrong := self._mismatch(lease.header, chunk, tenant):
                return None, replace(report, outcome="failed", tier=found.tier, reason=wrong)
            return lease, replace(report, tier=found.tier, variant=object_key.variant, reason="")
        except StoreError as error:
            return None, replace(report, outcome="failed", reason=str(error))
        finally:
            loaded.lookup_ms += (perf_counter() - begin) * 1e3

    def _mismatch(self, header: Header, chunk: Chunk, tenant: str) -> str:
        """Return why an object is not this chunk's KV for this model, or an empty string. A key is only a claim."""
        d = self.decoder
        if header.token_ids != chunk.token_ids:
            return "the stored tokens are not the chunk's"
        if header.namespace != self.namespace(tenant).digest:
            return "the object belongs to another namespace"
        if (header.layers, header.kv_heads, header.head_dim, header.dtype) != (
            d.layers,
            d.kv_heads,
            d.head_dim,
            self._dtype,
        ):
            return "the object has another shape or dtype than the model's KV"
        return ""

    def _place(self, lease: Lease, report: ChunkReport, canvas: Canvas, tokens: int, loaded: Loaded) -> ChunkReport:
        begin = perf_counter()
        header = lease.header
        try:
            raw = lease.payload()
        except StoreError as error:
            loaded.fetch_ms += (perf_counter() - begin) * 1e3
            return replace(report, outcome="failed", reason=str(error))
        fetched = perf_counter()
        shape = (header.layers, 2, header.kv_heads, len(header.token_ids), header.head_dim)
        payload = torch.frombuffer(raw, dtype=self.decoder.dtype).view(shape).to(canvas.k.device)
        place(
            canvas,
            payload,
            report.start,
            stored_at=header.position,
            rotations=self.decoder.rotations,
            tokens=tokens,
        )
        passes.synchronize(canvas.k.device)
        loaded.fetch_ms += (fetched - begin) * 1e3
        loaded.rotate_ms += (perf_counter() - fetched) * 1e3
        return replace(report, outcome="hit", nbytes=header.payload_nbytes)

    def forget(self, key: str) -> int:
        """Remove every variant of a content key, and every variant of others that was encoded behind it.

        Returns the number of objects that were removed. A variant that a request holds goes when it is released.
        """
        doomed = [ObjectKey(key, variant) for variant in self.store.variants(key)]
        stored = self.store.keys()
        doomed += [k for k in stored if k.conditioned and key in self._neighbours(k)]
        return sum(self.store.remove(k) for k in doomed)

    def _neighbours(self, key: ObjectKey) -> tuple[str, ...]:
        try:
            lease = self.store.get(key)
        except StoreError:
            return ()
        if lease is None:
            return ()
        with lease:
            return lease.header.neighbours

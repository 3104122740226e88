"""Chunks of one model in the store: encode them, look them up, forget them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Literal

import torch

from blend.encoding import Encoder, Mean, with_sensitivity
from blend.errors import InvalidInput, ObjectCorrupt, ResourceExhausted, StoreError
from blend.filling import Filling, Lost, Place
from blend.helper import Helper
from blend.model.decoder import Decoder
from blend.recompute.planner import PrefillSpeed
from blend.store import (
    Header,
    Namespace,
    ObjectKey,
    Stored,
    TieredStore,
    conditioned_variant,
    content_key,
    new_generation,
)
from blend.store.key import PLAIN, model_of
from blend.types import Chunk, Prompt, Variant
from blend.writes import Writes

Which = Literal["none", "exact", "all"]


class ChunkCache:
    """Encodes chunks behind the sink and keeps them in the store, under keys that name everything they depend on.

    Where the decoder is one of several shards, each keeps its own heads' KV, under a fingerprint of its own, and all of
    them call :meth:`encode` and settle what :meth:`find` returns in the same order.

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
        self._encoder = Encoder(decoder, sink, speed, max_rows)
        self._generation = new_generation()
        self._helper = Helper("placing")
        self._writes = Writes(store)
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

    def behind(self, chunk: Chunk, tenant: str) -> tuple[str, ...]:
        """Return the content keys that the stored conditioned variant was encoded behind, in order; ``()`` without one.

        A hint, from a header alone: a tier that fails, or that tells no header without a look-up, counts as one that
        has none.
        """
        try:
            found = self.store.resolve(self.key(chunk, tenant), "conditioned")
        except StoreError:  # the store has counted it
            return ()
        headers = self.store.headers([found]) if found is not None else iter(())
        return next((h.neighbours for h in headers if not self._mismatch(h, chunk, tenant)), ())

    def known(self, most: int) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return namespace digest and token ids of this model's chunks that the store can tell of, all tenants'.

        What was used or stored last comes last, as far as the store knows; of what is more than ``most`` tokens, the
        others are left out. A header is read for each, and no payload.
        """
        model = model_of(self.namespace("default").tag)
        keys = {key.content: key for key in list(self.store.keys()) if model_of(key.namespace) == model}
        found: list[tuple[bytes, tuple[int, ...]]] = []
        for key in reversed(keys.values()):
            for header in self.store.headers([key]):
                most -= header.tokens
                if most < 0:
                    return found[::-1]
                found.append((header.namespace, header.token_ids))
        return found[::-1]

    def prepare(self, chunk: Chunk, tenant: str, behind: Sequence[Chunk]) -> Mean | None:
        """Return what a chunk's KV behind each context of related chunks is to be added to.

        Others' work may go between slices of that; :meth:`encode` is given the mean then. ``None`` where that variant
        is stored or on its way there, and where the decoder is one of several shards: :meth:`encode` has them compute
        together. Errors are those of :meth:`encode`.
        """
        key = self._variant(chunk, tenant, behind)
        if self.decoder.shards.size > 1:
            return None
        if self._writes.under_way(key) is not None or self.store.contains(key):
            return None
        return self._encoder.mean(chunk, behind)

    def longest_neighbour(self, tokens: int) -> int:
        """Return how many tokens a related chunk may have that a chunk of so many is encoded behind."""
        return self._encoder.longest_neighbour(tokens)

    def _variant(self, chunk: Chunk, tenant: str, behind: Sequence[Chunk]) -> ObjectKey:
        neighbours = tuple(self.key(other, tenant) for other in behind)
        return ObjectKey(self.key(chunk, tenant), conditioned_variant(neighbours) if neighbours else PLAIN)

    def encode(
        self, chunk: Chunk, tenant: str, behind: Sequence[Chunk] = (), mean: Mean | None = None
    ) -> tuple[Stored | None, bool]:
        """Compute a chunk's KV behind the sink (and behind related chunks) and give it to the store.

        What is encoded behind related chunks, as the mean over their contexts, is stored with its sensitivity, and then
        takes the place of any other conditioned variant of the chunk.

        Returns the three events of the write, and whether anything was computed: not when that variant is stored
        already (``None``) or on its way there, on every shard. To be called by one thread at a time.

        Args:
            mean: what :meth:`prepare` returned for them, with all contexts added.

        Raises:
            InvalidPrompt: a token id that the model has not got.
            PromptTooLong: the sink, a context of related chunks and the chunk exceed the model's context.
        """
        key = self._variant(chunk, tenant, behind)
        under_way = self._writes.under_way(key)
        held = under_way is not None or self.store.contains(key)
        if all(self.decoder.shards.everywhere([held])):
            return under_way, False
        kv, moved = self._encoder.encode(chunk, behind, lambda: self._plain(chunk, tenant), mean)
        if held:  # computed for a shard that had not got it
            return under_way, True
        header = Header(
            namespace=self.namespace(tenant).digest,
            key=key,
            token_ids=chunk.token_ids,
            layers=self.decoder.layers,
            kv_heads=self.decoder.kv_heads,
            head_dim=self.decoder.head_dim,
            dtype=self._dtype,
            position=self._encoder.position(behind),
            neighbours=tuple(self.key(other, tenant) for other in behind),
            generation=self._generation,
        )
        if moved is not None:
            header = with_sensitivity(header, moved)
        raw = memoryview(kv.view(torch.uint8).numpy()).cast("B")
        return self._writes.put(header.sealed(raw), raw), True

    def _plain(self, chunk: Chunk, tenant: str) -> torch.Tensor | None:
        """Return the KV ``[L, 2, KVH, T, D]`` of a chunk's plain variant, if it is stored."""
        try:
            lease = self.store.get(ObjectKey(self.key(chunk, tenant), PLAIN))
            if lease is None:
                return None
            with lease:
                if self._mismatch(lease.header, chunk, tenant):
                    return None
                raw, (layers, heads, tokens, dim) = lease.payload(), lease.header.shape
        except (StoreError, ResourceExhausted):  # the store has counted it, and it can be computed
            return None
        return torch.frombuffer(raw, dtype=self.decoder.dtype).view(layers, 2, heads, tokens, dim)

    def find(self, prompt: Prompt, tenant: str, variant: Variant, which: Which, lost: Lost) -> Filling:
        """Look up the prompt's chunks and begin to load them: all, those that are exact where they stand, or none.

        A chunk is exact where its left context is the very one it was encoded behind. A chunk that is not
        stored, whose bytes fail in any tier, or that is among the ``lost``, is left to be computed; it costs no other
        chunk.
        """
        begin = perf_counter()
        ids, places = prompt.token_ids, []
        for start, part in prompt.parts():
            exact = part.first == 0 and ids[:start] == self.sink
            place = Place(part, start, self.key(part.chunk, tenant), exact, None)
            if which == "all" or (which == "exact" and exact):
                place = self._resolve(place, "plain" if exact else variant, lost)
            places.append(place)
        return Filling(
            places,
            self.store,
            lambda header, chunk: self._mismatch(header, chunk, tenant),
            self.decoder.rotations,
            self.decoder.dtype,
            self.decoder.kernels,
            self._helper,
            self.decoder.shards,
            last=len(ids) - 1,
            begun=begin,
        )

    def _resolve(self, place: Place, variant: Variant, lost: Lost) -> Place:
        try:
            wanted = self.store.resolve(place.key, variant)
        except StoreError as error:
            return replace(place, outcome="failed", reason=str(error))
        if wanted is not None and wanted not in lost:
            return replace(place, wanted=wanted)
        # What was lost is not there any more, or not to be tried again.
        why = next((reason for key, reason in lost.items() if key.content == place.key), None)
        if why is not None:
            return replace(place, outcome="failed", reason=why)
        return replace(place, outcome="miss", reason="not stored")

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

    def give_up(self, keys: Collection[str]) -> tuple[ObjectKey, ...]:
        """Do not answer any more for writes of these content keys, nor of what was encoded behind one of them.

        To be called in the thread that calls :meth:`encode`, and to be followed by :meth:`forget`: returns the objects
        that are on their way into the store, for it.
        """
        under_way = tuple(self._writes.of(keys))
        for k in under_way:
            self._writes.forget(k)
        return under_way

    def forget(self, keys: Collection[str], under_way: Collection[ObjectKey]) -> int:
        """Remove every variant of these content keys, and every variant of others that was encoded behind one of them.

        It asks all tiers, which may take long; any thread may call it. What was encoded before :meth:`give_up` is gone
        then; what is encoded meanwhile may stay, or go.

        Args:
            keys: which.
            under_way: what :meth:`give_up` returned for them.

        Returns the number of objects that were removed. A variant that a request holds goes when it is released, and
        what waits to be written is not written any more.

        Raises:
            TierUnavailable: a tier failed and may still have some; all that could be removed has been.
        """
        # What waits to be written may be in no tier yet: removing it has it stay so. It goes first, or it could be
        # written to a tier that has been asked already, and be there alone.
        removed, left = self._remove(under_way)
        doomed, unknown = self._doomed(frozenset(keys))
        more, remaining = self._remove(doomed)
        if (fault := remaining or unknown or left) is not None:
            raise fault
        return removed + more

    def _remove(self, keys: Iterable[ObjectKey]) -> tuple[int, StoreError | None]:
        """Remove these objects; return how many were there, and the fault of a tier that may still have one."""
        removed, fault = 0, None
        for k in keys:
            try:
                removed += self.store.remove(k)
            except StoreError as error:
                fault = error
        return removed, fault

    def _doomed(self, gone: frozenset[str]) -> tuple[dict[ObjectKey, None], StoreError | None]:
        """Return the objects of these content keys, and those that were encoded behind one of them.

        Also the fault of a tier, if one may have more of them than it could tell.
        """
        found: dict[ObjectKey, None] = {}
        others: dict[ObjectKey, None] = {}
        fault: StoreError | None = None
        for tier in self.store.tiers:
            try:
                found.update((ObjectKey(key, variant), None) for key in gone for variant in tier.variants(key))
                others.update((k, None) for k in list(tier.keys()) if k.conditioned)
            except StoreError as error:
                self.store.count_fault(tier.name, error)
                fault = error
        for k in others:
            try:
                if not gone.isdisjoint(self._neighbours(k)):
                    found[k] = None
            except ObjectCorrupt:
                found[k] = None  # nobody can read it, nor tell what it was encoded behind
            except StoreError as error:
                fault = error
        return found, fault

    def writing(self) -> set[str]:
        """Return the tags of the namespaces of which objects are on their way into the store."""
        return self._writes.namespaces()

    def disown(self, tag: str) -> None:
        """Do not answer any more for writes of a tenant or namespace that is being dropped."""
        self._writes.disown(tag)

    def close(self) -> None:
        """End the thread that takes part in placing chunks. Safe to call again."""
        self._helper.close()

    def _neighbours(self, key: ObjectKey) -> tuple[str, ...]:
        """Return what a stored object was encoded behind; nothing where it is not there any more.

        Raises:
            ObjectCorrupt: it cannot be read.
            StoreError: a tier failed that may have it.
        """
        lease = self.store.get(key)
        if lease is None:
            return ()
        with lease:
            return lease.header.neighbours

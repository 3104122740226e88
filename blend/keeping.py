"""An engine's chunks as they come and go: computed when asked for or missed, forgotten, dropped with a namespace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter

import torch

from blend.chunks import ChunkCache
from blend.encoding import Mean
from blend.errors import InvalidInput, InvalidPrompt
from blend.misses import Misses
from blend.serving.job import Job
from blend.serving.scheduler import Scheduler
from blend.serving.steps import Alone, Prefill, Steps, do
from blend.stats import Counters, NamespaceStats
from blend.store import Dropped, ObjectKey, Stored, TieredStore
from blend.store.key import model_of, tenant_of
from blend.types import Chunk

_PATIENCE = 0.5
"""Seconds that a chunk which somebody waits for lets requests go before it."""


class Keeping:
    """What :class:`blend.Engine` does with chunks outside of requests: its methods say more. Thread-safe.

    Args:
        scheduler: owns the engine's thread.
        chunks: the model's chunks in the store.
        store: the store.
        counters: told of each chunk that was computed.

    Attributes:
        misses: what requests missed.
    """

    def __init__(self, scheduler: Scheduler, chunks: ChunkCache, store: TieredStore, counters: Counters) -> None:
        self._scheduler = scheduler
        self._chunks = chunks
        self._store = store
        self._counters = counters
        self.misses = Misses(scheduler, chunks.key, self._encode)

    def precompute(
        self, chunks: Iterable[Chunk], behind: Sequence[Sequence[Chunk]] | None, namespace: str
    ) -> list[str]:
        """Encode and store what is missing; returns content keys once all of it is as durable as it gets."""
        wanted = list(chunks)
        for chunk in wanted:
            if not isinstance(chunk, Chunk):
                raise InvalidPrompt("chunks", chunk, "Chunk values")
        related: Sequence[Sequence[Chunk]] = [()] * len(wanted) if behind is None else behind
        if len(related) != len(wanted):
            raise InvalidInput("behind", f"{len(related)} entries", f"one for each of the {len(wanted)} chunks")
        steps = self._encode_all(list(zip(wanted, related, strict=True)), namespace)
        keys, writes = self._scheduler.wait(self._scheduler.submit_background(Job(steps), _PATIENCE))
        for write in writes:  # while one chunk is written to lower tiers, the next ones are computed
            if write is not None:
                write.settled()
        return keys

    def _encode_all(
        self, chunks: Sequence[tuple[Chunk, Sequence[Chunk]]], namespace: str
    ) -> Steps[tuple[list[str], list[Stored | None]]]:
        keys, writes = [], []
        for chunk, others in chunks:
            keys.append(self._chunks.key(chunk, namespace))
            if others:
                writes.append((yield from self._encode_behind(chunk, namespace, others)))
            else:
                writes.append((yield from do(Alone(partial(self._encode_wanted, chunk, namespace)))))
        return keys, writes

    def _encode_wanted(self, chunk: Chunk, namespace: str) -> Stored | None:
        self._want(chunk, namespace)
        return self._encode(chunk, namespace)

    def _want(self, chunk: Chunk, namespace: str) -> None:
        self._store.known.learn(namespace)
        self.misses.want(self._chunks.key(chunk, namespace))

    def _encode_behind(self, chunk: Chunk, namespace: str, others: Sequence[Chunk]) -> Steps[Stored | None]:
        """Encode a chunk behind others, with other work between slices of it: that takes many chunks' time."""
        begun = perf_counter()

        def prepare() -> Mean | None:
            self._want(chunk, namespace)
            return self._chunks.prepare(chunk, namespace, others)

        mean = yield from do(Alone(prepare))
        if mean is not None:
            for context in mean.contexts:
                yield from _add(mean, context)
        keys = [self._chunks.key(one, namespace) for one in (chunk, *others)]

        def store() -> Stored | None:
            # What was forgotten meanwhile must not come back, nor what was encoded behind it.
            unwanted = self.misses.forgotten(keys, namespace, since=begun)
            return None if unwanted else self._encode(chunk, namespace, others, mean)

        return (yield from do(Alone(store)))

    def _encode(
        self, chunk: Chunk, namespace: str, behind: Sequence[Chunk] = (), mean: Mean | None = None
    ) -> Stored | None:
        write, computed = self._chunks.encode(chunk, namespace, behind, mean)
        if computed:
            self._counters.add("precomputed")
        return write

    def forget_keys(self, keys: Iterable[str]) -> int:
        """Remove chunks by content key from every tier; returns how many objects went."""
        gone = frozenset(keys)

        def give_up() -> tuple[ObjectKey, ...]:
            self.misses.forget(gone)
            return self._chunks.give_up(gone)

        # What is being encoded is given to the store before that. Requests need not wait for the tiers.
        return self._chunks.forget(gone, self._scheduler.call(give_up))

    def namespaces(self, namespace: str) -> tuple[NamespaceStats, ...]:
        """Return what every namespace has in each tier. Any ``namespace`` tells which of the tags are this model's."""
        model = model_of(self._chunks.namespace(namespace).tag)
        return tuple(
            NamespaceStats(
                name=self._store.known.name(tenant_of(usage.tag)),
                tag=usage.tag,
                current=model_of(usage.tag) == model,
                tiers=usage.tiers,
            )
            for usage in self._store.namespaces()
        )

    def drop_namespace(self, name: str) -> Dropped:
        """Remove every chunk of a namespace from every tier, whatever model it was made with."""
        self._chunks.namespace(name)

        def disown() -> str:
            self.misses.drop(name)
            tag = self._store.known.learn(name)
            self._chunks.disown(tag)
            return tag

        return self._store.drop(self._scheduler.call(disown))  # requests need not wait for that


def _add(mean: Mean, context: Sequence[Chunk]) -> Steps[None]:
    """Add one context to a mean. Its canvas is gone before the next one's is made."""
    canvas, ids = mean.prepare(context)
    yield from do(Prefill(canvas, ids, torch.arange(len(ids), device=ids.device), shared=False))
    mean.add(context, canvas)

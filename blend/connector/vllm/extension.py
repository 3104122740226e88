"""Calls into vLLM's workers, where model and store are: what a service needs beyond requests that run.

vLLM mixes :class:`ChunkCalls` into its worker's class (``worker_extension_cls``), and its ``collective_rpc`` calls the
methods by name, between two steps. Arguments and results are plain values, so that nothing has to be unpickled; an
error of blend's travels as a value, too, for vLLM would keep its message alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

from blend.errors import BlendError, Closed, ResourceExhausted, StoreError, TierUnavailable
from blend.stats import tenant_stats
from blend.types import Chunk

if TYPE_CHECKING:
    from blend.connector.vllm.worker import Worker
    from blend.store import Stored

EXTENSION = f"{__name__}.ChunkCalls"
"""What vLLM's ``worker_extension_cls`` is to be."""

_ERRORS = {kind.__name__: kind for kind in (StoreError, TierUnavailable, ResourceExhausted, Closed)}


def _answered(call: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Have a method return its result, or the error that it raised on purpose, as a value."""

    @wraps(call)
    def answer(*args: Any) -> dict[str, Any]:
        try:
            return {"value": call(*args)}
        except BlendError as error:
            kind = next((name for name, kind in _ERRORS.items() if type(error) is kind), BlendError.__name__)
            return {"error": kind, "message": str(error)}

    return answer


def value_of(answer: Mapping[str, Any]) -> Any:
    """Return what a call returned.

    Raises:
        BlendError: what the call raised, of the same kind where it is one of store or budget.
    """
    if "error" in answer:
        raise _ERRORS.get(answer["error"], BlendError)(answer["message"])
    return answer["value"]


class ChunkCalls:
    """Methods of vLLM's worker for the chunks in its store."""

    @_answered
    def blend_describe(self) -> dict[str, Any]:
        """Return what this worker's chunks depend on, the model's shape, and where it publishes residency events."""
        worker = _worker()
        decoder, residency = worker.chunks.decoder, worker.store.residency
        return {
            "fingerprint": worker.fingerprint,
            "device": str(decoder.device),
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "kernels": decoder.kernels.backend,
            "sink": len(worker.chunks.sink),
            "layers": decoder.layers,
            "kv_bytes_per_token": 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * decoder.dtype.itemsize,
            "max_positions": decoder.max_positions,
            "vocab_size": decoder.vocab_size,
            "setup": asdict(worker.setup),
            "residency": None
            if residency is None
            else [residency.publisher.node, residency.publisher.address, residency.publisher.replay_address],
        }

    @_answered
    def blend_missing(self, chunks: list[list[int]], tenant: str) -> list[int]:
        """Return which of these chunks, by their places, do not seem to be stored."""
        worker = _worker()
        worker.store.known.learn(tenant)
        return [place for place, ids in enumerate(chunks) if not worker.chunks.has(Chunk(ids), tenant)]

    @_answered
    def blend_encode(self, token_ids: list[int], tenant: str) -> list[Any]:
        """Encode a chunk that is not stored; return whether that took computing, and a number for its write.

        The number, for :meth:`blend_written`, is ``None`` where there is no write to wait for.
        """
        worker, writes = _worker(), self._blend_writes()
        worker.store.known.learn(tenant)
        write, computed = worker.queue.encode(Chunk(token_ids), tenant)
        if write is None:
            return [computed, None]
        number = max(writes, default=-1) + 1
        writes[number] = write
        return [computed, number]

    @_answered
    def blend_written(self, number: int) -> bool:
        """Return whether a write has ended.

        Raises:
            StoreError, ResourceExhausted: no tier took the chunk.
        """
        write = self._blend_writes()[number]
        if not write.durable.done():
            return False
        del self._blend_writes()[number]
        write.settled()
        return True

    @_answered
    def blend_forget(self, keys: list[str]) -> int:
        """Remove chunks by content key from the store and from what waits to be encoded; return how many objects."""
        worker = _worker()
        worker.queue.forget(keys)
        return worker.chunks.forget(keys, worker.chunks.give_up(keys))

    @_answered
    def blend_stats(self) -> dict[str, Any]:
        """Return what the store has done and what it holds."""
        store = _worker().store
        return {
            "tiers": [asdict(stats) for stats in store.tier_stats()],
            "loads": asdict(store.load_stats()),
            "writes": asdict(store.write_stats()),
            "tenants": [asdict(stats) for stats in tenant_stats(store)],
        }

    @_answered
    def blend_close(self) -> None:
        """Close the store, which takes its time; vLLM's own end gives it a few seconds."""
        if (connector := _connector()) is not None:
            connector.shutdown()

    def _blend_writes(self) -> dict[int, Stored]:
        """Writes that somebody waits for. The class is mixed in: its own constructor never runs."""
        found: dict[int, Stored] = self.__dict__.setdefault("_blend_pending", {})
        return found


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def _worker() -> Worker:
    """Return the connector's half in this worker.

    Raises:
        BlendError: there is none: blend blends nothing in this configuration.
    """
    connector = _connector()
    worker: Worker | None = getattr(connector, "worker", None)
    if worker is None:
        raise BlendError(getattr(connector, "refusal", "") or "vLLM runs without blend's connector")
    return worker

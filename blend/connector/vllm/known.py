"""The chunks that are known to the scheduler's half: what requests have named, and what was in the store at start-up.

That half has no store. The worker's half has one, and knows what its namespaces are made of; it tells both before any
request comes, by the handshake that vLLM has for its connectors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from blend.connector.client import DEFAULT_TENANT
from blend.connector.recognise import Recogniser
from blend.store import Namespace
from blend.types import Part

if TYPE_CHECKING:
    from blend.chunks import ChunkCache


@dataclass
class Stored(KVConnectorHandshakeMetadata):
    """What a worker's store has of its model.

    Args:
        namespace: that of any tenant.
        chunks: namespace digest and token ids of each chunk.
    """

    namespace: Namespace
    chunks: list[tuple[bytes, npt.NDArray[np.uint32]]] = field(repr=False)

    @classmethod
    def of(cls, chunks: ChunkCache, most: int) -> Stored:
        """Return what is in the store of these chunks, ``most`` tokens of it."""
        found = [(owner, np.array(token_ids, np.uint32)) for owner, token_ids in chunks.known(most)]
        return cls(chunks.namespace(DEFAULT_TENANT), found)


class KnownChunks:
    """Finds known chunks in prompts, each tenant's for that tenant alone."""

    def __init__(self) -> None:
        secret = os.urandom(32)
        self._recogniser = Recogniser(secret)
        self._namespace = Namespace(DEFAULT_TENANT, "0" * 16, secret)

    def start(self, stored: Stored) -> None:
        """Take note of what the worker's store has. To be called before anything else."""
        self._namespace = stored.namespace
        for owner, token_ids in stored.chunks:
            self._recogniser.learn(owner.hex(), token_ids.tolist())

    def learn(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Take note of a tenant's chunk."""
        self._recogniser.learn(self._owner(tenant), token_ids)

    def find(self, tenant: str, token_ids: Sequence[int]) -> list[tuple[int, Part]]:
        """Return position and part of each of the tenant's known chunks in a prompt, in order."""
        return self._recogniser.find(self._owner(tenant), token_ids)

    def _owner(self, tenant: str) -> str:
        return replace(self._namespace, tenant=tenant).digest.hex()

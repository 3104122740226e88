"""What the service needs of an engine, and which one it gets: the native one, or vLLM."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from blend.config import EngineConfig, ServerConfig
from blend.errors import InvalidConfig
from blend.types import Answer, Chunk, Plan, Prompt, Sampling, Token

if TYPE_CHECKING:
    from blend.model.tokenizer import Tokenizer
    from blend.shadow.record import Trip
    from blend.stats import EngineStats

logger = logging.getLogger("blend_server")

_NAMESPACE = "default"


class ServedEngine(Protocol):
    """An engine that answers prompts from stored chunks; :class:`blend.Engine` says what each method does.

    All methods may be called from any thread. Where an engine cannot do what is asked, it raises
    :class:`~blend.errors.InvalidInput` before anything runs.
    """

    tokenizer: Tokenizer

    def precompute(self, chunks: Iterable[Chunk], *, namespace: str = _NAMESPACE) -> list[str]:
        """Encode and store what is missing; returns content keys once all of it is as durable as it gets."""
        ...

    def content_key(self, chunk: Chunk, *, namespace: str = _NAMESPACE) -> str:
        """Return a chunk's key."""
        ...

    def missing(self, chunks: Iterable[Chunk], *, namespace: str = _NAMESPACE) -> list[Chunk]:
        """Return those chunks that do not seem to be stored."""
        ...

    def forget_keys(self, keys: Iterable[str]) -> int:
        """Remove chunks from every tier; no request brings them back that was there before."""
        ...

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        namespace: str = _NAMESPACE,
        compare_full: bool = False,
        positions: bool = False,
        arrived: float | None = None,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Iterator[Token | Answer]:
        """Answer token by token, the :class:`~blend.types.Answer` last. Closing the iterator cancels."""
        ...

    def stats(self) -> EngineStats:
        """Return figures."""
        ...

    def reset_shadow(self) -> Trip | None:
        """Let ``auto`` blend again after its quality stopped it; returns what had stopped it."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it takes requests; once it does not, it never will again."""
        ...

    def stop_background(self) -> None:
        """Drop work that nobody waits for, and take no more of it."""
        ...

    def close(self) -> None:
        """End the engine and close its store. Safe to call again."""
        ...


@runtime_checkable
class ConditioningEngine(ServedEngine, Protocol):
    """An engine that encodes chunks behind others, as their ``conditioned`` variant. The native one does."""

    def precompute(
        self,
        chunks: Iterable[Chunk],
        behind: Sequence[Sequence[Chunk]] | None = None,
        *,
        namespace: str = _NAMESPACE,
    ) -> list[str]:
        """Encode and store what is missing, each chunk behind those that stand at its place in ``behind``."""
        ...

    def behind(self, chunk: Chunk, *, namespace: str = _NAMESPACE) -> tuple[str, ...]:
        """Return the content keys that a chunk's stored variant was encoded behind; ``()`` where there is none."""
        ...

    def longest_neighbour(self, tokens: int) -> int:
        """Return how many tokens a neighbour of a chunk of so many may have."""
        ...


def open_engine(config: ServerConfig) -> ServedEngine:
    """Return the engine that the settings ask for.

    Its store is in the service's data directory, unless the settings give it another place.

    Raises:
        InvalidConfig: vLLM is asked for and not installed, or has no such argument.
        ModelError: the model cannot be used.
        StoreError: the store cannot be used.
    """
    settings = _engine_config(config)
    if config.vllm is None:
        return _native(settings)
    if importlib.util.find_spec("vllm") is None:
        raise InvalidConfig("vllm", "vllm", "native, for vLLM is not installed: pip install 'blendkv[vllm]'")
    from blend.connector.vllm.engine import VllmEngine

    return VllmEngine(settings, config.vllm)


def _native(settings: EngineConfig) -> ServedEngine:
    # Here, for a process that has vLLM generate need not load the native engine's kernels.
    from blend.engine import Engine

    engine = Engine(settings)
    if (residency := engine.store.residency) is not None:
        told = residency.publisher
        logger.info("event=residency node=%s publish=%s replay=%s", told.node, told.address, told.replay_address)
    return engine


def _engine_config(config: ServerConfig) -> EngineConfig:
    """The engine's settings, with the store in the service's data directory unless it names its own."""
    store = config.engine.store
    if store.directory is not None:
        return config.engine
    return replace(config.engine, store=replace(store, directory=config.path / "store"))

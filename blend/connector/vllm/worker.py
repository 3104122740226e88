"""The connector's half in the worker: it has the model, the paged cache and the store."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig

from blend.chunks import ChunkCache
from blend.config import ConnectorConfig
from blend.connector.client import DEFAULT_TENANT
from blend.connector.recognise import RECOGNISED_TOKENS
from blend.connector.vllm.blending import Blender
from blend.connector.vllm.decoder import EngineDecoder, skeleton_of
from blend.connector.vllm.jobs import Job
from blend.connector.vllm.known import Stored
from blend.connector.vllm.pages import Pages
from blend.connector.vllm.plugin import root_of
from blend.connector.vllm.queue import Queue
from blend.connector.vllm.selftest import check_layout
from blend.encoding import CONTEXT
from blend.errors import BlendError, ModelUnsupported
from blend.model import source
from blend.model.fingerprint import fingerprint
from blend.model.tokenizer import Tokenizer
from blend.recompute import assemble, calibration, passes
from blend.recompute.planner import PrefillSpeed
from blend.stats import setup_of
from blend.store import LAYOUT_VERSION, TieredStore, open_store
from blend.store.key import model_of

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.3
"""Of work in a step in which nobody else is under way. Who comes meanwhile waits for its end."""


class Worker:
    """Blends requests behind the forward passes of vLLM's steps, in the share of time that they have for it.

    Attributes:
        queue: what is under way.

    Args:
        config: vLLM's configuration.
        cache: of its paged cache.
        settings: the connector's own.

    Raises:
        ModelUnsupported: the model, or the paged cache, is not what blending needs; the reason is said.
        ModelError, TierUnavailable: the model's files or the store cannot be used.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorConfig) -> None:
        (group,) = cache.kv_cache_groups
        attention = get_layers_from_vllm_config(config, Attention, group.layer_names)
        model = root_of(next(iter(attention.values())))
        if not hasattr(model, "compute_logits"):
            raise ModelUnsupported(
                str(config.model_config.model),
                "vLLM's model was not seen when it was built: is blendkv installed, and not left out by VLLM_PLUGINS?",
            )
        directory = source.resolve(settings.model or config.model_config.model)
        skeleton = skeleton_of(directory)
        decoder = EngineDecoder(model, attention, config, skeleton, settings.kernels)
        pages = Pages(model, attention, config, group.kv_cache_spec)
        check_layout(pages, decoder, attention, config)
        assemble.prepare(decoder.dtype, decoder.device)
        tokenizer = Tokenizer.from_directory(directory)
        sink = _sink(settings, tokenizer)
        text = skeleton.config.get_text_config(decoder=True)
        self.fingerprint = fingerprint(
            directory,
            skeleton.config.to_dict(),
            tokenizer=tokenizer.digest,
            dtype=str(decoder.dtype),
            sink=sink,
            layout_version=LAYOUT_VERSION,
            context=CONTEXT,
            rope=getattr(text, "rope_parameters", None) or {},
            tp_rank=decoder.shards.rank,
            tp_size=decoder.shards.size,
        )
        self.setup = setup_of("vllm", skeleton.config, tokenizer, decoder.shards)
        with ExitStack() as undo:
            self.store: TieredStore
            # What a rank holds, all hold: one of them tells of it.
            told = settings.store if decoder.shards.rank == 0 else replace(settings.store, residency=None)
            self.store, secret = open_store(told)
            undo.callback(self.store.close)
            self.chunks = ChunkCache(
                decoder, sink, self.store, self.fingerprint, secret, PrefillSpeed(decoder), pages.max_rows
            )
            loaded = calibration.load(settings.model or config.model_config.model, directory)
            self.queue = Queue(Blender(decoder, pages, self.chunks, loaded), self.chunks, settings.capture_queue)
            undo.pop_all()
        self._device = decoder.device
        self._share = settings.step_share
        self._began = perf_counter()

    def stored(self) -> Stored:
        """Return what the store has of this model."""
        return Stored.of(self.chunks, RECOGNISED_TOKENS)

    def begin(self) -> None:
        """Take note of the beginning of a step, before its forward pass."""
        self._began = perf_counter()

    def step(self, jobs: Sequence[Job], refused: Collection[str], idle: bool) -> None:
        """Do a step's share of the work, behind its forward pass.

        Args:
            jobs: requests that are new.
            refused: requests that are to fail.
            idle: whether there was no forward pass, nobody else being under way.
        """
        self.queue.add(jobs)
        self.queue.refuse(refused)
        if idle:
            self.queue.run(_IDLE_SECONDS, idle)
        elif self.queue.open:
            passes.synchronize(self._device)
            self.queue.run(self._share * (perf_counter() - self._began), idle)

    def forget(self) -> None:
        """Remove every chunk of this model from every tier, whoever's it is, and begin anew with what is under way."""
        self.queue.restart()
        model = model_of(self.chunks.namespace(DEFAULT_TENANT).tag)
        try:
            tags = {usage.tag for usage in self.store.namespaces()} | self.chunks.writing()
            for tag in tags:
                if model_of(tag) == model:
                    self.chunks.disown(tag)
                    self.store.drop(tag)
        except BlendError as error:
            _log.warning("some of the model's chunks could not be removed: %s", error)

    def close(self) -> frozenset[str]:
        """Give up what is under way, which is returned, and close the store. Safe to call again."""
        abandoned = self.queue.close()
        self.chunks.close()
        self.store.close()
        return abandoned


def _sink(settings: ConnectorConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(settings.sink, tuple):
        return settings.sink
    first = tokenizer.bos_or_template_start()
    return () if first is None else (first,)

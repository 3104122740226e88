"""The connector's half in the worker: it has the model, the paged cache and the store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig

from blend.chunks import ChunkCache
from blend.config import ConnectorConfig
from blend.connector.vllm.blending import Blender
from blend.connector.vllm.decoder import EngineDecoder, skeleton_of
from blend.connector.vllm.jobs import Job, Report
from blend.connector.vllm.pages import Pages
from blend.connector.vllm.plugin import root_of
from blend.connector.vllm.selftest import check_layout
from blend.errors import BlendError, ModelUnsupported
from blend.model import source
from blend.model.decoder import FAULTS
from blend.model.fingerprint import fingerprint
from blend.model.tokenizer import Tokenizer
from blend.recompute import assemble, calibration
from blend.recompute.planner import PrefillSpeed
from blend.store import LAYOUT_VERSION, TieredStore, open_store
from blend.types import Chunk

_log = logging.getLogger(__name__)


class Worker:
    """Blends requests before a step's forward pass, and encodes missing chunks in idle steps.

    Args:
        config: vLLM's configuration.
        cache: of its paged cache.
        settings: the connector's own.

    Raises:
        ModelUnsupported: the model, or the paged cache, is not what blending needs; the reason is said.
        ModelError, TierUnavailable: the model's files or the store cannot be used.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorConfig) -> None:
        self._settings = settings
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
            rope=getattr(text, "rope_parameters", None) or {},
        )
        with ExitStack() as undo:
            self.store: TieredStore
            self.store, secret = open_store(settings.store)
            undo.callback(self.store.close)
            self.chunks = ChunkCache(
                decoder, sink, self.store, self.fingerprint, secret, PrefillSpeed(decoder), pages.max_rows
            )
            loaded = calibration.load(settings.model or config.model_config.model, directory)
            self._blender = Blender(decoder, pages, self.chunks, loaded)
            undo.pop_all()
        self._missed: dict[tuple[Chunk, str], None] = {}
        self._failed: set[int] = set()
        self._reports: dict[str, Report] = {}

    def blend(self, jobs: Sequence[Job]) -> None:
        """Fill the blocks of these requests, at full prefill where blending fails; what fails even so is reported."""
        for job in jobs:
            try:
                report, missed = self._blender.run(job)
            except (BlendError, *FAULTS) as error:
                _log.warning("request %s runs at full prefill, for blending failed", job.request_id, exc_info=error)
                self._compute(job)
                continue
            self._reports[job.request_id] = report
            for chunk in missed:
                if self._settings.capture_tokens and len(self._missed) < self._settings.capture_queue:
                    self._missed[chunk, job.request.tenant] = None

    def _compute(self, job: Job) -> None:
        try:
            self._blender.compute(job)
        except FAULTS as error:
            _log.warning("the blocks of request %s could not be filled", job.request_id, exc_info=error)
            self.fail(self._blender.blocks_of(job))

    def fail(self, blocks: Iterable[int]) -> None:
        """Report blocks as not loaded."""
        self._failed.update(blocks)

    def capture(self) -> int:
        """Encode missing chunks until an idle step's tokens are used up; returns how many chunks were encoded."""
        left, encoded = self._settings.capture_tokens, 0
        for chunk, tenant in tuple(self._missed):
            if left <= 0:
                break
            left -= len(chunk)
            del self._missed[chunk, tenant]
            try:
                encoded += self.chunks.encode(chunk, tenant)[1]
            except (BlendError, *FAULTS) as error:
                _log.warning("a missing chunk of %d tokens could not be encoded: %s", len(chunk), error)
        return encoded

    def take_failed(self) -> set[int]:
        """Return the blocks that could not be filled since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_reports(self) -> dict[str, Report]:
        """Return the reports of the requests that were blended since the last call, by vLLM's ids."""
        reports, self._reports = self._reports, {}
        return reports

    def close(self) -> None:
        """Close the store. Safe to call again."""
        self.chunks.close()
        self.store.close()


def _sink(settings: ConnectorConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(settings.sink, tuple):
        return settings.sink
    first = tokenizer.bos_or_template_start()
    return () if first is None else (first,)

"""The class that vLLM loads: it hands vLLM's calls on to one of the two halves."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from blend.config import ConnectorConfig
from blend.connector.vllm.jobs import Job, Outcomes
from blend.connector.vllm.known import Stored
from blend.connector.vllm.metrics import PrometheusMetrics, Stats
from blend.connector.vllm.scheduling import Scheduling
from blend.connector.vllm.support import refusal

if TYPE_CHECKING:
    from blend.connector.vllm.worker import Worker

_log = logging.getLogger(__name__)


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the worker for one step.

    Requests to blend, requests that are refused, whether there is nothing else to do, and whether what is stored of
    the model is to be forgotten.
    """

    jobs: tuple[Job, ...] = ()
    refused: frozenset[str] = frozenset()
    idle: bool = False
    reset: bool = False


@dataclass
class Done(KVConnectorWorkerMetadata):
    """What the worker tells the scheduler of a step.

    What became of requests, and whether there is work left for steps in which no request is under way.
    """

    outcomes: Outcomes
    busy: bool

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return what two workers tell as one. They do the same work, each for its part of the model's heads."""
        assert isinstance(other, Done)
        return Done(self.outcomes.beside(other.outcomes), self.busy or other.busy)


class BlendConnector(KVConnectorBase_V1):
    """Chunk KV out of blend's store for vLLM's requests, with a few tokens computed afresh.

    A request asks for it by ``kv_transfer_params`` from :func:`blend.connector.client.build_prompt`, or
    :func:`~blend.connector.client.ask_to_recognise`; others are none of its business, unless its settings say that
    known chunks are found in all of them. ``kv_connector_extra_config`` holds the settings of
    :class:`blend.config.ConnectorConfig`.

    Raises:
        InvalidConfig: a setting is wrong.
        ModelUnsupported: on start-up, when a self-test fails. What is only not supported, such as pipeline parallelism,
            is said in one warning, and every request runs at full prefill.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._cache = kv_cache_config
        self._settings = ConnectorConfig.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.refusal = refusal(vllm_config, kv_cache_config)
        self._outcomes = Outcomes()
        self._abandoned: frozenset[str] = frozenset()
        self._busy = False
        self._resetting = False
        self.worker: Worker | None = None
        self.scheduling: Scheduling | None = None
        if role == KVConnectorRole.SCHEDULER:
            if self.refusal:
                _log.warning("nothing is blended, requests run at full prefill: %s is not supported", self.refusal)
            (group, *_) = kv_cache_config.kv_cache_groups
            longest = self._settings.scratch_tokens or vllm_config.model_config.max_model_len
            model = str(vllm_config.model_config.model)
            fails = vllm_config.kv_transfer_config.kv_load_failure_policy == "fail"
            self.scheduling = Scheduling(
                model, group.kv_cache_spec.block_size, longest, self._settings, self.refusal, fails
            )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return statistics that hold ``data``, as vLLM passes them on."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrometheusMetrics:
        """Return the metrics that statistics go to, made in vLLM's own registry."""
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether somebody waits for KV that a request hands on: nobody does."""
        return False

    # ------------------------------------------------------------- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take note of what the store has: once, before any request comes. All ranks have the same chunks."""
        stored = metadata.get(0)
        if self.scheduling is not None and self.scheduling.known is not None and isinstance(stored, Stored):
            self.scheduling.known.start(stored)

    def on_new_request(self, request: Request) -> None:
        """Read what a request asks for, and keep its blocks apart from others'."""
        if self.scheduling is not None:
            self.scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens will be filled in, and that this takes some steps."""
        found = 0 if self.scheduling is None else self.scheduling.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Take note of a request's blocks."""
        if self.scheduling is not None and num_external_tokens > 0:
            self.scheduling.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the worker is to do in this step."""
        half, idle = self.scheduling, scheduler_output.total_num_scheduled_tokens == 0
        reset, self._resetting = self._resetting, False
        return Step() if half is None else Step(half.take_jobs(), half.take_refused(), idle, reset)

    def reset_cache(self) -> bool:
        """Have every chunk of this model removed from every tier, if that is set.

        vLLM asks for it before it sleeps, too, and chunks are as good as ever then. They are not after a change of
        weights in place, of which their keys know nothing.
        """
        self._resetting = self._settings.reset_removes and not self.refusal
        return True

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, whose blocks may go at once; its report goes out with its last token."""
        return False, (None if self.scheduling is None else self.scheduling.ended(request))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what became of a step."""
        found = connector_output.kv_connector_worker_meta
        if self.scheduling is not None and isinstance(found, Done):
            self._busy = found.busy
            self.scheduling.came_to(found.outcomes)

    def get_kv_connector_stats(self) -> Stats | None:
        """Return what has become of requests since the last call; the worker's half counts nothing of its own."""
        return None if self.scheduling is None else self.scheduling.take_stats()

    def has_pending_push_work(self) -> bool:
        """Whether steps are wanted although no request is under way: missing chunks are encoded in such."""
        return self._busy or self._resetting

    # ---------------------------------------------------------------- worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the store has, for the scheduler's half; ``None`` where no chunks are to be found in prompts."""
        return None if self.worker is None or self._settings.recognise == "off" else self.worker.stored()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Run the self-tests and open the store. The caches themselves are reached through vLLM's layers."""
        if not self.refusal:
            # Not before: vLLM asks for this class early on, and then fails to start where numba has been imported.
            from blend.connector.vllm.worker import Worker

            self.worker = Worker(self._config, self._cache, self._settings)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take note of what is to be done in a step that begins."""
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None:
            self.worker.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do this step's share of the work. vLLM calls it behind the forward pass, for no load is a synchronous one."""
        if self.worker is None or not self.has_connector_metadata():
            return
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        if step.reset:
            self.worker.forget()
        self.worker.step(step.jobs, step.refused, step.idle)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests' blocks are filled, or are not going to be; requests that have ended are given up."""
        if self.worker is None:
            self._outcomes = self._without_worker()
        else:
            self.worker.queue.drop(finished_req_ids)
            self._outcomes = self.worker.queue.take()
        return KVConnectorTransferResults(
            finished_recving=set(self._outcomes.ended),
            failed_recving=set(self._outcomes.failed | self._outcomes.refused),
        )

    def _without_worker(self) -> Outcomes:
        """Nothing is filled where nothing can be blended, nor behind the end; whoever waits for it is told so."""
        step = self._get_connector_metadata() if self.has_connector_metadata() else Step()
        assert isinstance(step, Step)
        failed = self._abandoned | {job.request_id for job in step.jobs}
        self._abandoned = frozenset()
        return Outcomes(ended=failed | step.refused, failed=failed, refused=step.refused)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """Return what became of this step's requests."""
        outcomes, self._outcomes = self._outcomes, Outcomes()
        return Done(outcomes, self.worker is not None and self.worker.queue.capturing)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM computes a request's question only when its blocks are filled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing: a request's KV depends on its whole prompt, and is nobody's chunk."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def take_events(self) -> Iterable[Any]:
        """Return vLLM's own kind of cache events: none, for chunks have no place in its chains of hashes."""
        return ()

    def shutdown(self) -> None:
        """Give up what is under way, and close the store."""
        if self.worker is not None:
            self._abandoned = self.worker.close()
            self.worker = None

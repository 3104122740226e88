"""The connector's half in vLLM's scheduler: what a request asks for, and which of its tokens are filled in."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from blend.config import ConnectorConfig
from blend.connector.client import KEY, BlendRequest, digest, parse, wants_strict
from blend.connector.vllm.jobs import Job, Report
from blend.errors import BlendError, InvalidInput
from blend.model import source
from blend.recompute import calibration, planner
from blend.types import Chunk, Plan

_log = logging.getLogger(__name__)

_OF_CHUNKS_ALONE = frozenset(("head", "reuse"))
"""Methods whose choice does not depend on the plain text, the question included."""


class Scheduling:
    """Keeps what requests ask for, from their arrival to their end.

    Args:
        model: vLLM's name of the model.
        block_size: tokens of a block of the paged cache.
        longest: longest prompt that is blended, in tokens.
        settings: the connector's own.
        refusal: why nothing can be blended in this engine, or an empty string.
        fails: whether vLLM fails a request whose blocks could not be loaded, which refusing one takes.

    Attributes:
        cache: vLLM's manager of the paged cache, once there is one.
    """

    def __init__(
        self, model: str, block_size: int, longest: int, settings: ConnectorConfig, refusal: str, fails: bool
    ) -> None:
        self.cache: KVCacheManager | None = None
        self._fails = fails
        self._model = model
        self._block_size = block_size
        self._longest = longest
        self._refusal = refusal
        self._warned = False
        name = settings.model or model
        self._calibration = None if refusal else calibration.load(name, Path(source.resolve(name)))
        self._live: dict[str, Request] = {}
        self._asked: dict[str, BlendRequest] = {}
        self._refused: dict[str, int] = {}
        self._refused_blocks: set[int] = set()
        self._jobs: dict[str, Job] = {}
        self._reports: dict[str, Report] = {}

    @property
    def open(self) -> int:
        """Things that are kept of requests which have not ended."""
        return len(self._live) + len(self._asked) + len(self._refused) + len(self._jobs) + len(self._reports)

    def arrived(self, request: Request) -> None:
        """Take note of a request. One that cannot be blended is served at full prefill, or refused where it is strict.

        A connector cannot refuse a request in so many words. It claims one token of it and then reports that as not
        loaded, so that vLLM finishes the request with an error, as far as it is set to (``kv_load_failure_policy``).
        """
        self._live[request.request_id] = request
        try:
            asked = self._read(request)
        except BlendError as error:
            strict = self._fails and wants_strict(request.kv_transfer_params)
            how = "refused" if strict else "served at full prefill"
            if strict or not self._refusal or not self._warned:
                _log.warning("request %s is %s: %s", request.request_id, how, error)
            self._warned = self._warned or bool(self._refusal)
            if strict:
                self._refused[request.request_id] = 0
                _rehash(request, 0, f"refused:{request.request_id}", self._block_size)
            return
        if asked is not None:
            self._asked[request.request_id] = asked
            _separate(request, asked, self._model, self._block_size)

    def _read(self, request: Request) -> BlendRequest | None:
        asked = parse(request.kv_transfer_params, request.prompt_token_ids or ())
        if asked is None:
            return None
        if self._refusal:
            raise InvalidInput("engine", self._refusal, "a configuration that can be blended in")
        if request.lora_request is not None:
            raise InvalidInput("lora_request", request.lora_request.lora_name, "none: chunks are the base model's")
        if request.resumable:
            raise InvalidInput("prompt", "one that grows while it runs", "a whole one")
        if request.prompt_embeds is not None or request.mm_features:
            raise InvalidInput("prompt", "embeddings or other modalities", "token ids alone")
        if request.skip_reading_prefix_cache:
            raise InvalidInput("prompt_logprobs", "asked for", "none: they need every token computed")
        if len(asked.prompt) > self._longest:
            raise InvalidInput("prompt", f"{len(asked.prompt)} tokens", f"at most {self._longest}")
        decision = planner.decide(asked.plan, self._calibration)
        return None if decision.method in ("full", "prefix") else asked

    def matched(self, request: Request, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` ones will be filled in. At least one is left to vLLM.

        ``None``, which has vLLM ask again in the next step, where a block of the prefix is still to be written by the
        forward pass of this one: blending goes before that, and reads the prefix.
        """
        if request.request_id in self._refused:
            self._refused[request.request_id] = computed
            return 1 if computed < request.num_tokens - 1 else 0
        asked = self._asked.get(request.request_id)
        if asked is None or _end(asked) <= computed:
            return 0
        return None if self._unwritten(request, computed) else _end(asked) - computed

    def _unwritten(self, request: Request, computed: int) -> bool:
        if self.cache is None or computed == 0:
            return False
        pool, size = self.cache.block_pool, self._block_size
        found = [pool.get_cached_block(value, [0]) for value in request.block_hashes[: computed // size]]
        wanted = {blocks[0].block_id for blocks in found if blocks}
        running = (r for r in self._live.values() if r.status == RequestStatus.RUNNING)
        # vLLM lists a block as cached when it is allocated, and counts its tokens as computed when the step is planned.
        return any(
            not wanted.isdisjoint(self.cache.get_block_ids(other.request_id)[0][other.num_computed_tokens // size :])
            for other in running
        )

    def allocated(self, request: Request, blocks: tuple[int, ...], external: int) -> None:
        """Take note of the blocks that the tokens go to."""
        if request.request_id in self._refused and external > 0:
            self._refused_blocks.add(blocks[self._refused[request.request_id] // self._block_size])
        asked = self._asked.get(request.request_id)
        if asked is not None and external > 0:
            end = _end(asked)
            self._jobs[request.request_id] = Job(request.request_id, asked, blocks, end - external, end)

    def take_jobs(self) -> tuple[Job, ...]:
        """Return the jobs of this step."""
        jobs, self._jobs = tuple(self._jobs.values()), {}
        return jobs

    def take_refused(self) -> tuple[int, ...]:
        """Return the blocks of requests that are refused in this step."""
        blocks, self._refused_blocks = tuple(self._refused_blocks), set()
        return blocks

    def blended(self, reports: Mapping[str, Report]) -> None:
        """Take note of what became of requests that were blended."""
        self._reports.update((name, report) for name, report in reports.items() if name in self._asked)

    def ended(self, request: Request) -> dict[str, Any] | None:
        """Forget a request, however it ended; returns what its output says of it."""
        self._live.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)
        self._refused.pop(request.request_id, None)
        self._jobs.pop(request.request_id, None)
        report = self._reports.pop(request.request_id, None)
        return None if report is None else {KEY: report.as_dict()}


def _end(asked: BlendRequest) -> int:
    return min(asked.end, len(asked.prompt) - 1)


def _separate(request: Request, asked: BlendRequest, model: str, block_size: int) -> None:
    """Give the request's blocks hashes of their own, so that blended KV never serves another request.

    vLLM finds blocks by a chain of hashes of tokens. From the first block on that holds a chunk's token, the chain goes
    on from a digest of everything that the blended KV depends on; only the identical request meets it again. Blocks
    before that one hold exact KV and keep their hashes: every request shares them.
    """
    first = next(start for start, _, segment in asked.prompt.spans() if isinstance(segment, Chunk))
    _rehash(request, first, _salt(asked, model, request.cache_salt), block_size)


def _rehash(request: Request, first: int, salt: str, block_size: int) -> None:
    """Have the chain of hashes go on from ``salt`` from the block of position ``first`` on."""
    shared, hashes = first // block_size, request.block_hashes
    if len(hashes) > shared > 0:
        del hashes[shared:]
        last = hashes[-1]
        hashes[-1] = BlockHash(hashlib.sha256(bytes(last) + salt.encode()).digest())
        request.update_block_hashes()
        hashes[shared - 1] = last
        return
    # Where no block behind the shared ones is whole yet, later ones would go on from an exact one.
    request.cache_salt = salt
    hashes.clear()
    request.update_block_hashes()


def _salt(asked: BlendRequest, model: str, salt: str | None) -> str:
    """Digest of what a request's blended KV depends on: tenant, model, plan, chunks, and the text where it matters."""
    plan: Plan = asked.plan
    by_chunks = plan.method in _OF_CHUNKS_ALONE
    spans = [
        (start, end, digest(segment.token_ids))
        for start, end, segment in asked.prompt.spans()
        if isinstance(segment, Chunk)
    ]
    fields: dict[str, Any] = {
        "tenant": asked.tenant,
        "model": model,
        "plan": asdict(plan),
        "chunks": spans,
        "text": "" if by_chunks else digest(asked.prompt.token_ids),
        "salt": salt,
    }
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return "blend:" + hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()

"""The connector's half in vLLM's scheduler: what a request asks for, and which of its tokens are filled in."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from blend.config import ConnectorConfig
from blend.connector.client import DEFAULT_TENANT, KEY, BlendRequest, digest, parse, recognised, wants_strict
from blend.connector.vllm.jobs import Job, Outcomes, Report
from blend.connector.vllm.known import KnownChunks
from blend.connector.vllm.metrics import Stats
from blend.errors import InvalidInput
from blend.model import source
from blend.recompute import calibration, planner
from blend.types import Plan

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
        stats: what has become of requests since it was last taken.
        known: the chunks that are found in prompts which do not name them; ``None`` where none are to be found.
    """

    def __init__(
        self, model: str, block_size: int, longest: int, settings: ConnectorConfig, refusal: str, fails: bool
    ) -> None:
        self.known = None if settings.recognise == "off" else KnownChunks()
        self._always = settings.recognise == "always"
        self._fails = fails
        self._model = model
        self._block_size = block_size
        self._longest = longest
        self._refusal = refusal
        self._warned = False
        name = settings.model or model
        self._calibration = None if refusal else calibration.load(name, Path(source.resolve(name)))
        self._asked: dict[str, BlendRequest] = {}
        self._salts: dict[str, str] = {}
        self._under_way: dict[str, str] = {}
        self._refused: set[str] = set()
        self._refusing: set[str] = set()
        self._jobs: dict[str, Job] = {}
        self._reports: dict[str, Report] = {}
        self.stats = Stats()

    @property
    def open(self) -> int:
        """Things that are kept of requests which have not ended."""
        kept = self._asked, self._salts, self._under_way, self._refused, self._refusing, self._jobs, self._reports
        return sum(len(things) for things in kept)

    def arrived(self, request: Request) -> None:
        """Take note of a request. One that cannot be blended is served at full prefill, or refused where it is strict.

        A connector cannot refuse a request in so many words. It claims one token of it and then reports that as not
        loaded, so that vLLM finishes the request with an error, as far as it is set to (``kv_load_failure_policy``).
        """
        try:
            asked = self._read(request)
            salt = "" if asked is None else _salt(asked, self._model, request.cache_salt)
        except Exception as error:  # noqa: BLE001 - whatever a client sends, the engine outlives it
            strict = self._fails and wants_strict(request.kv_transfer_params)
            how = "refused" if strict else "served at full prefill"
            if strict or not self._refusal or not self._warned:
                _log.warning("request %s is %s: %s", request.request_id, how, error)
            self._warned = self._warned or bool(self._refusal)
            if strict:
                self.stats.ended("refused")
                self._refused.add(request.request_id)
                _rehash(request, 0, f"refused:{request.request_id}", self._block_size)
            return
        if asked is not None:
            self._asked[request.request_id] = asked
            self._salts[request.request_id] = salt
            _rehash(request, _first_chunk(asked), salt, self._block_size)

    def _read(self, request: Request) -> BlendRequest | None:
        params, token_ids = request.kv_transfer_params, request.prompt_token_ids or ()
        if not (isinstance(params, Mapping) and KEY in params):
            return self._recognise(request, token_ids)
        self._check(request)
        asked = parse(params, token_ids, self.known)
        if asked is None or self._exact(asked.plan):
            return None
        if self.known is not None:
            for _, part in asked.prompt.parts():
                self.known.learn(asked.tenant, part.chunk.token_ids)
        return asked

    def _recognise(self, request: Request, token_ids: Sequence[int]) -> BlendRequest | None:
        """Return what is asked for a request that asks for nothing."""
        plan = Plan()
        if not self._always or self.known is None or request.cache_salt is not None or self._exact(plan):
            return None
        try:
            self._check(request)
        except InvalidInput:
            return None
        return recognised(self.known, token_ids, plan, DEFAULT_TENANT)

    def _exact(self, plan: Plan) -> bool:
        return planner.decide(plan, self._calibration).method in ("full", "prefix")

    def _check(self, request: Request) -> None:
        """Refuse what cannot be blended, whatever chunks there are."""
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
        if request.num_prompt_tokens > self._longest:
            raise InvalidInput("prompt", f"{request.num_prompt_tokens} tokens", f"at most {self._longest}")

    def matched(self, request: Request, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` ones will be filled in: all but the last, if any is a chunk's.

        The question is computed with them, for vLLM would do that in one step, which holds others up. ``None``, which
        has vLLM ask again in the next step, while the same is being filled in for another request: this one will find
        that one's blocks.
        """
        if request.request_id in self._refused:
            return 1 if computed < request.num_tokens else 0
        asked = self._asked.get(request.request_id)
        if asked is None or asked.end <= computed:
            return 0
        if self._under_way.get(self._salts[request.request_id], request.request_id) != request.request_id:
            return None
        return len(asked.prompt) - 1 - computed

    def allocated(self, request: Request, blocks: tuple[int, ...], external: int) -> None:
        """Take note of the blocks that the tokens go to."""
        if request.request_id in self._refused and external > 0:
            self._refusing.add(request.request_id)
        asked = self._asked.get(request.request_id)
        if asked is not None and external > 0:
            end = len(asked.prompt) - 1
            self._jobs[request.request_id] = Job(request.request_id, asked, blocks, end - external, end)
            self._under_way[self._salts[request.request_id]] = request.request_id

    def take_jobs(self) -> tuple[Job, ...]:
        """Return the jobs of this step."""
        jobs, self._jobs = tuple(self._jobs.values()), {}
        return jobs

    def take_refused(self) -> frozenset[str]:
        """Return the requests that are refused in this step."""
        refused, self._refusing = frozenset(self._refusing), set()
        return refused

    def came_to(self, outcomes: Outcomes) -> None:
        """Take note of what became of requests. One whose blocks were not filled is not blended again."""
        for name, report in outcomes.reports:
            self.stats.saw(report)
            if name in self._asked:
                self._reports[name] = report
        for name in outcomes.ended:
            self._done(name)
        for name in outcomes.failed:
            self._asked.pop(name, None)
            self.stats.ended("failed")
        self.stats.encoded(outcomes.encoded)

    def take_stats(self) -> Stats:
        """Return what has become of requests since the last call."""
        stats, self.stats = self.stats, Stats()
        return stats

    def _done(self, name: str) -> bool:
        """Say that a request is no longer under way; returns whether it was."""
        salt = self._salts.get(name, "")
        if self._under_way.get(salt) != name:
            return False
        del self._under_way[salt]
        return True

    def ended(self, request: Request) -> dict[str, Any] | None:
        """Forget a request, however it ended; returns what its output says of it."""
        name = request.request_id
        if self._done(name) and request.status != RequestStatus.FINISHED_ERROR:
            self.stats.ended("given_up")
        self._asked.pop(name, None)
        self._salts.pop(name, None)
        self._refused.discard(name)
        self._jobs.pop(name, None)
        report = self._reports.pop(name, None)
        return None if report is None else {KEY: report.as_dict()}


def _first_chunk(asked: BlendRequest) -> int:
    return next(start for start, _ in asked.prompt.parts())


def _rehash(request: Request, first: int, salt: str, block_size: int) -> None:
    """Have the chain of hashes go on from ``salt`` from the block of position ``first`` on.

    vLLM finds blocks by a chain of hashes of tokens. Where this digests everything that the blended KV depends on, only
    the identical request meets it again, and it never serves another one. Blocks before hold exact KV and keep their
    hashes: every request shares them.
    """
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
    spans = [(start, part.first, part.end, digest(part.chunk.token_ids)) for start, part in asked.prompt.parts()]
    fields: dict[str, Any] = {
        "tenant": asked.tenant,
        "model": model,
        "plan": asdict(plan),
        "chunks": spans,
        "last": min(len(asked.prompt) - 1, asked.end),  # the last token is never taken from the store
        "text": "" if by_chunks else digest(asked.prompt.token_ids),
        "salt": salt,
    }
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return "blend:" + hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()

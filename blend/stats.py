"""What an engine has done since it started."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from blend.errors import StoreError
from blend.store import LAYOUT_VERSION, LoadStats, TieredStore, TierStats, Usage, WriteStats
from blend.types import Report

if TYPE_CHECKING:
    from blend.model.shards import Shards
    from blend.model.tokenizer import Tokenizer


class Counters:
    """Counts over all requests; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._modes: dict[str, int] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def finished(self, report: Report) -> None:
        """Count a request that reached its first token."""
        with self._lock:
            self._modes[report.mode] = self._modes.get(report.mode, 0) + 1
        for name, amount in (
            ("requests", 1),
            ("prompt_tokens", report.tokens),
            ("cached_tokens", report.cached),
            ("selected_tokens", report.selected),
            ("ttft_ms", report.timings.ttft),
        ):
            self.add(name, amount)
        for chunk in report.chunks:
            self.add(f"chunks_{chunk.outcome}")

    def snapshot(self) -> dict[str, Any]:
        """Return all counts, requests by mode under ``modes``."""
        with self._lock:
            return {**self._counts, "modes": dict(self._modes)}


@dataclass(frozen=True)
class TenantStats:
    """What one tenant holds in one tier, and may hold (``None`` where only the tier's budget counts), in bytes.

    ``name`` is what calls take as ``namespace``, or ``None`` for one that this process has not met; ``tag`` is the
    part of its keys that stands for it.
    """

    name: str | None
    tag: str
    tier: str
    used_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True)
class NamespaceStats:
    """What one tenant's chunks for one model take up.

    ``name`` is as for :class:`TenantStats`; ``tag`` is of tenant and model. ``current`` tells whether it is this
    engine's model: what is not is never read by it. ``tiers`` has objects and bytes by the tier's name.
    """

    name: str | None
    tag: str
    current: bool
    tiers: Mapping[str, Usage]


@dataclass(frozen=True)
class ScratchStats:
    """What prefills take of the device's memory at most, in bytes.

    ``planned_bytes`` is for a prompt as long as the model's context with nothing of it stored, ``parts`` what that is
    made of (:class:`~blend.recompute.scratch.Need`); ``largest_bytes`` the most that a request has been admitted
    with, 0 before the first; ``available_bytes`` what the device has to spare now, ``None`` where that is not known;
    ``held_bytes`` what requests that run were admitted with, ``promised_bytes`` the part of it that is still to be
    written.
    """

    planned_bytes: int
    parts: Mapping[str, int]
    largest_bytes: int
    available_bytes: int | None
    held_bytes: int = 0
    promised_bytes: int = 0


@dataclass(frozen=True)
class Setup:
    """What stored KV and answers depend on besides the model's weights.

    ``engine`` is ``native`` or ``vllm``; ``tokenizer`` the digest of all that decides on token ids; ``rope`` the rotary
    parameters in force, as JSON; ``tensor_parallel`` among how many shards the heads are shared out.
    """

    engine: str
    tokenizer: str
    layout_version: int
    rope: str
    tensor_parallel: int


@dataclass(frozen=True)
class MethodQuality:
    """How close requests were to full prefill whose plans named one method, by the KL of their first token in nats.

    Since the start ``compared`` were, ``agreed`` of them in the likeliest token; ``kl_sum`` is over these, and so are
    ``kl_buckets``: bounds, each with how many had a KL of at most that. The others are of the last ``window`` of them,
    ``None`` where there are too few: ``upper_kl`` is the upper end of the mean's confidence interval, one-sided at 95%.
    """

    compared: int
    agreed: int
    kl_sum: float
    kl_buckets: tuple[tuple[float, int], ...]
    window: int
    mean_kl: float | None
    upper_kl: float | None
    last_kl: float | None
    top1_agreement: float | None


@dataclass(frozen=True)
class ShadowStats:
    """Requests that were also run at full prefill, and what followed from that.

    Of the requests chosen by ``share``, ``run`` were compared in the background, ``failed`` ended in an error,
    ``dropped`` went without for lack of time or memory, and ``pending`` wait. ``broken`` counts comparisons whose KL
    was no number. ``methods`` is by the method that plans named, and ``auto_limited`` for ``auto`` within limits of the
    plan's own. ``tripped``: whether ``auto`` was stopped, since when (ISO 8601, UTC), and why.
    """

    share: float
    max_kl: float | None
    run: int
    failed: int
    dropped: int
    pending: int
    broken: int
    methods: Mapping[str, MethodQuality]
    tripped: bool
    since: str | None
    reason: str


@dataclass(frozen=True)
class EngineStats:
    """The model's identity and shape, counters since start, and the state of memory, tiers, loads, writes, tenants.

    ``kernels`` is the version that runs: ``triton``, ``torch`` or ``reference``. Where another engine than
    the native one runs, ``waiting``, ``running``, ``scratch`` and ``shadow`` are ``None``: it queues and plans its
    memory itself, and nothing is compared.
    """

    model: str
    model_fingerprint: str
    device: str
    dtype: str
    kernels: str
    layers: int
    kv_bytes_per_token: int
    max_positions: int
    calibrated: bool
    waiting: int | None
    counters: dict[str, Any]
    background: dict[str, int]
    scratch: ScratchStats | None
    tiers: tuple[TierStats, ...]
    loads: LoadStats
    writes: WriteStats
    setup: Setup
    tenants: tuple[TenantStats, ...] = ()
    shadow: ShadowStats | None = None
    running: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dicts, lists, strings and numbers."""
        return asdict(self)


def setup_of(engine: str, config: Any, tokenizer: Tokenizer, shards: Shards) -> Setup:
    """Return the set-up of an engine (``native``, ``vllm``) whose model has that transformers configuration."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return Setup(
        engine=engine,
        tokenizer=tokenizer.digest,
        layout_version=LAYOUT_VERSION,
        rope=json.dumps(rope, sort_keys=True, separators=(",", ":"), default=str),
        tensor_parallel=shards.size,
    )


def tenant_stats(store: TieredStore) -> tuple[TenantStats, ...]:
    """Return what every tenant holds in every tier of a store; a tier that fails is counted there and left out."""
    found = []
    for tier in store.tiers:
        try:
            usages = tier.tenants()
        except StoreError as error:
            store.count_fault(tier.name, error)
            continue
        found += [
            TenantStats(store.known.name(usage.tenant), usage.tenant, tier.name, usage.used_bytes, usage.quota_bytes)
            for usage in usages
        ]
    return tuple(found)

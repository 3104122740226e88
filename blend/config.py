"""Every setting and its default, once. Wrong values fail at construction with :class:`InvalidConfig`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from blend.errors import InvalidConfig

_Settings = TypeVar("_Settings")

GiB = 1 << 30
MiB = 1 << 20
MAX_THREADS = 1024
MAX_TENANT = 128
"""Most characters of a tenant's name."""
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
KERNELS = ("auto", "torch", "triton", "reference")


def cache_dir() -> Path:
    """Directory for models and stored KV: ``$BLEND_CACHE``, else ``$XDG_CACHE_HOME/blend``, else ``~/.cache/blend``."""
    if root := os.environ.get("BLEND_CACHE"):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "blend"


def _at_least(name: str, value: object, low: int, unit: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidConfig(name, value, f"an integer of at least {low} ({unit})")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfig(name, value, ", ".join(allowed))


def _within(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:  # type: ignore[operator]
        raise InvalidConfig(name, value, f"a number from {low} to {high}")


MOONCAKE_PROTOCOLS = ("tcp", "rdma")
MOONCAKE_ADMIN_PORT = 9003
"""Where a master serves its admin pages unless it is told otherwise."""
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class MooncakeConfig:
    """How a process takes part in a Mooncake store.

    Args:
        master: ``host:port`` of the master's RPC.
        health: ``host:port`` of its admin pages; ``None`` means port 9003 of the master's host.
        hostname: the address that other nodes reach this one at. A process that lends memory, or that reads from
            one that does, opens data ports on all interfaces: keep them behind a firewall.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas; empty lets the library choose.
        segment_bytes: memory that this process lends to the store; 0 makes it a pure client.
        local_buffer_bytes: memory for the library's own calls that copy, of which this tier makes none.
        capacity_bytes: most bytes of objects that this process puts and keeps in the store.
        staging_bytes: registered memory that its transfers go through; views that it hands out live there.
        prefix: what the names of its objects begin with; tiers of one prefix share objects.
        deadline_seconds: how long a call may take, beside 20 ms a MiB.
        connect_seconds: how long opening the tier waits for the master before it starts as down.
        health_seconds: time between two looks at the health page, and how long one may take.
        negative_seconds: how long a key counts as missing after its owner could not be reached; the master goes on
            listing the keys of a dead owner for about 10 s.
        threads: calls that may be under way at once.

    Raises:
        InvalidConfig: a value is malformed or out of range.
    """

    master: str
    health: str | None = None
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    local_buffer_bytes: int = 0
    capacity_bytes: int = 16 * GiB
    staging_bytes: int = 256 * MiB
    prefix: str = "blend"
    deadline_seconds: float = 2.0
    connect_seconds: float = 2.0
    health_seconds: float = 1.0
    negative_seconds: float = 12.0
    threads: int = 4

    def __post_init__(self) -> None:
        for name in ("master", "health"):
            value = getattr(self, name)
            if value is not None and not _is_address(value):
                raise InvalidConfig(f"mooncake.{name}", value, "host:port with a port from 1 to 65535")
        if not isinstance(self.hostname, str) or not self.hostname:
            raise InvalidConfig("mooncake.hostname", self.hostname, "a host name or an address")
        _one_of("mooncake.protocol", self.protocol, MOONCAKE_PROTOCOLS)
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix):
            raise InvalidConfig("mooncake.prefix", self.prefix, "1 to 64 letters, digits, dots, dashes, underscores")
        for name, low in {
            "segment_bytes": 0,
            "local_buffer_bytes": 0,
            "capacity_bytes": 1,
            "staging_bytes": 4096,
            "threads": 1,
        }.items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise InvalidConfig(f"mooncake.{name}", value, f"an integer of at least {low}")
        for name, least in {
            "deadline_seconds": 0.01,
            "connect_seconds": 0.0,
            "health_seconds": 0.01,
            "negative_seconds": 0.0,
        }.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise InvalidConfig(f"mooncake.{name}", value, f"seconds, at least {least}")

    @property
    def health_address(self) -> str:
        """``host:port`` of the master's admin pages."""
        return self.health or f"{self.master.rpartition(':')[0]}:{MOONCAKE_ADMIN_PORT}"


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and _is_port(port) and int(port) > 0


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536


RESIDENCY_LOOPBACK = "tcp://127.0.0.1:*"
"""Where residency events are published unless they are told otherwise: this machine alone, on a free port."""
MAX_NODE_NAME = 256
_OWN_ENDPOINT = "tcp://HOST:PORT, where the port * takes a free one, or ipc://PATH"
_OTHERS_ENDPOINT = "tcp://HOST:PORT or ipc://PATH"


@dataclass(frozen=True)
class ResidencySource:
    """Another node to listen to.

    Args:
        address: where it publishes residency events: ``tcp://host:port`` or ``ipc://path``.
        replay_address: where its last messages can be asked for; ``None`` means that what it said before is not.

    Raises:
        InvalidConfig: an address is malformed.
    """

    address: str
    replay_address: str | None = None

    def __post_init__(self) -> None:
        for name in ("address", "replay_address"):
            value = getattr(self, name)
            if not (value is None and name == "replay_address") and not _is_endpoint(value):
                raise InvalidConfig(f"residency.sources.{name}", value, _OTHERS_ENDPOINT)


@dataclass(frozen=True)
class ResidencyConfig:
    """What a node tells of the objects that its tiers come to hold and lose, and whom it listens to.

    Events hold keys, sizes and names, nothing of any text; whoever reaches the addresses can read them.

    Args:
        node: this node's name, as the others and a router know it.
        publish: where events are published: ``tcp://host:port``, port ``*`` taking a free one, or ``ipc://path``.
        replay: where the last of them can be asked for.
        sources: the nodes to follow. A Mooncake tier learns from them which variants others have stored.
        max_entries: most objects of other nodes that are remembered.

    Raises:
        InvalidConfig: a value is malformed or out of range.
    """

    node: str
    publish: str = RESIDENCY_LOOPBACK
    replay: str = RESIDENCY_LOOPBACK
    sources: tuple[ResidencySource, ...] = ()
    max_entries: int = 1_000_000

    def __post_init__(self) -> None:
        if not isinstance(self.node, str) or not 0 < len(self.node) <= MAX_NODE_NAME:
            raise InvalidConfig("residency.node", self.node, f"a name of 1 to {MAX_NODE_NAME} characters")
        for name in ("publish", "replay"):
            value = getattr(self, name)
            if not _is_endpoint(value, own=True):
                raise InvalidConfig(f"residency.{name}", value, _OWN_ENDPOINT)
        if not isinstance(self.sources, tuple) or not all(isinstance(s, ResidencySource) for s in self.sources):
            raise InvalidConfig("residency.sources", self.sources, "a tuple of ResidencySource")
        _at_least("residency.max_entries", self.max_entries, 1, "objects")


def _is_endpoint(value: object, own: bool = False) -> bool:
    """Whether ZeroMQ could bind (``own``) or connect to an address."""
    if not isinstance(value, str) or not value.isprintable() or " " in value:
        return False
    scheme, _, rest = value.partition("://")
    if scheme == "ipc":
        return 0 < len(rest.encode()) < 100
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or (host == "*" and not own):
        return False
    return _is_address(rest) or (own and port == "*")


def _check_quotas(default: int | None, quotas: tuple[tuple[str, int], ...]) -> None:
    if default is not None:
        _at_least("store.tenant_quota_bytes", default, 1, "bytes")
    pairs = isinstance(quotas, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in quotas)
    if not pairs:
        raise InvalidConfig("store.tenant_quotas", quotas, "a tuple of pairs: a tenant's name, and bytes")
    seen: set[str] = set()
    for name, nbytes in quotas:
        if not _is_tenant(name) or name in seen:
            raise InvalidConfig("store.tenant_quotas", name, f"different names of 1 to {MAX_TENANT} characters")
        seen.add(name)
        _at_least(f"store.tenant_quotas[{name!r}]", nbytes, 1, "bytes")


def _is_tenant(name: object) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_TENANT and name.encode(errors="ignore").decode() == name


@dataclass(frozen=True)
class StoreConfig:
    """The tiered store.

    Args:
        host_bytes: budget of the host-memory tier; 0 leaves the tier out. With a GPU, the host tier's memory is pinned
            as a whole when the engine starts.
        disk_bytes: budget of the disk tier; 0 leaves the tier out.
        directory: where the disk tier lives; ``None`` means ``cache_dir() / "store"``.
        fsync: whether a stored object is flushed to the device before it counts as durable.
        secret: bytes that key every content key (shared by all engines of one store). ``None`` keeps a
            random secret in the store's directory, readable by the owner alone; machines that share a Mooncake
            store need to be given the same one.
        write_policy: when an object goes to the tiers below the fastest: ``write_through`` (at once),
            ``write_through_selective`` (once it was found ``write_hits`` times) or ``write_back`` (when it is evicted
            from the fastest, and at close).
        write_hits: see above.
        write_retries: how often a failed write to a lower tier is tried again.
        prefetch_policy: how long a request waits for slow tiers before it goes on without the chunks that are not all
            there: ``best_effort`` (not at all: what has come while it queued), ``wait_complete`` (until all is
            there, 30 s at most; it begins with the first layer, and waits for each further one where it needs it,
            2 s at most) or
            ``timeout`` (``prefetch_base_ms + prefetch_ms_per_ki_token`` × tokens / 1024).
        prefetch_base_ms, prefetch_ms_per_ki_token: see above, in milliseconds.
        staging_bytes: budget of objects that wait to be written to lower tiers.
        inflight_bytes: budget of objects that are being loaded from lower tiers.
        high_watermark: share of a tier's budget above which it evicts.
        low_watermark: share of its budget at which it stops.
        lease_seconds: how long a reader may hold an object without renewing; ``None`` means without end.
        tenant_quota_bytes: most bytes that a tenant (a namespace, to the engine's calls) may hold in the host tier, and
            again in the disk tier, there in all processes together; ``None`` means no limit but the tier's budget.
        tenant_quotas: pairs of a tenant's name and its own quota in bytes, instead of that one.
        mooncake: a Mooncake store below the other tiers, shared by several machines; ``None`` leaves it out.
        residency: tells other nodes what the tiers hold, and listens to what they tell; ``None`` does neither.
    """

    host_bytes: int = 1 * GiB
    disk_bytes: int = 16 * GiB
    directory: str | Path | None = None
    fsync: bool = True
    secret: bytes | None = field(default=None, repr=False)
    write_policy: str = "write_through"
    write_hits: int = 2
    write_retries: int = 2
    prefetch_policy: str = "wait_complete"
    prefetch_base_ms: float = 20.0
    prefetch_ms_per_ki_token: float = 20.0
    staging_bytes: int = 256 * MiB
    inflight_bytes: int = 1 * GiB
    high_watermark: float = 0.95
    low_watermark: float = 0.9
    lease_seconds: float | None = None
    tenant_quota_bytes: int | None = None
    tenant_quotas: tuple[tuple[str, int], ...] = ()
    mooncake: MooncakeConfig | None = None
    residency: ResidencyConfig | None = None

    def __post_init__(self) -> None:
        _at_least("store.host_bytes", self.host_bytes, 0, "bytes")
        _at_least("store.disk_bytes", self.disk_bytes, 0, "bytes")
        if not self.host_bytes and not self.disk_bytes and self.mooncake is None:
            raise InvalidConfig("store.host_bytes, store.disk_bytes", 0, "at least one tier with a budget")
        if self.secret is not None and (not isinstance(self.secret, bytes) or len(self.secret) < 16):
            raise InvalidConfig("store.secret", "…", "at least 16 bytes, or none")
        _one_of("store.write_policy", self.write_policy, WRITE_POLICIES)
        _one_of("store.prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        _at_least("store.write_hits", self.write_hits, 1, "hits")
        _at_least("store.write_retries", self.write_retries, 0, "retries")
        _at_least("store.staging_bytes", self.staging_bytes, 0, "bytes")
        _at_least("store.inflight_bytes", self.inflight_bytes, 1, "bytes")
        _within("store.prefetch_base_ms", self.prefetch_base_ms, 0.0, math.inf)
        _within("store.prefetch_ms_per_ki_token", self.prefetch_ms_per_ki_token, 0.0, math.inf)
        _within("store.high_watermark", self.high_watermark, 0.01, 1.0)
        _within("store.low_watermark", self.low_watermark, 0.01, self.high_watermark)
        if self.lease_seconds is not None:
            _within("store.lease_seconds", self.lease_seconds, 0.001, math.inf)
        _check_quotas(self.tenant_quota_bytes, self.tenant_quotas)

    @property
    def path(self) -> Path:
        """The disk tier's directory."""
        return Path(self.directory).expanduser() if self.directory is not None else cache_dir() / "store"


@dataclass(frozen=True)
class EngineConfig:
    """The engine.

    Args:
        model: ``smollm2-135m`` (embedded default), a directory in transformers format, or a hub id.
        device: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.
        dtype: ``auto`` (bfloat16 where the device computes in it, else float32), or a name.
        kernels: what attention and the selectors' sums run on: ``auto`` (Triton on CUDA where it is installed and the
            GPU has room for it, else torch), ``torch``, ``triton``, or ``reference`` (short and slow: what the others
            are held against).
        sink: the tokens that every chunk is encoded behind and that are dropped afterwards: ``bos`` (the
            tokenizer's BOS, or its template's first token) or token ids; an empty tuple means none.
        max_rows: most rows of one forward pass; longer prefills run in slices of this size.
        threads: CPU threads for torch; ``None`` leaves torch's own setting.
        recompute_misses: whether a chunk that was missing is encoded for later, after its request.
        store: the tiered store.
    """

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    kernels: Literal["auto", "torch", "triton", "reference"] = "auto"
    sink: str | tuple[int, ...] = "bos"
    max_rows: int = 8192
    threads: int | None = None
    recompute_misses: bool = True
    store: StoreConfig = StoreConfig()

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidConfig("model", self.model, "a name, a directory or a hub id")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidConfig("device", self.device, "auto, cpu or cuda")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise InvalidConfig("dtype", self.dtype, "auto, float32, bfloat16 or float16")
        _one_of("kernels", self.kernels, KERNELS)
        if isinstance(self.sink, str):
            if self.sink != "bos":
                raise InvalidConfig("sink", self.sink, "'bos' or a tuple of token ids")
        elif not all(isinstance(t, int) and t >= 0 for t in self.sink):
            raise InvalidConfig("sink", self.sink, "'bos' or a tuple of token ids")
        _at_least("max_rows", self.max_rows, 1, "rows")
        if self.threads is not None:
            _at_least("threads", self.threads, 1, "threads")
            if self.threads > MAX_THREADS:
                raise InvalidConfig("threads", self.threads, f"at most {MAX_THREADS}")


@dataclass(frozen=True)
class RagConfig:
    """Documents, retrieval and prompts.

    Args:
        chunk_tokens: most tokens of one chunk, the chunk template's tokens included.
        embedding_model: ``all-minilm-l6-v2`` (carried by a package) or whatever sentence-transformers loads.
        top_k: passages given to a question unless it asks for another number.
        max_document_bytes: largest document, in bytes of UTF-8.
        max_new_tokens: answer length unless a question asks for another.
        system: the system turn of the prompt.
        answer_prefix: text that the assistant's turn is begun with.
    """

    chunk_tokens: int = 256
    embedding_model: str = "all-minilm-l6-v2"
    top_k: int = 5
    max_document_bytes: int = 8 * MiB
    max_new_tokens: int = 48
    system: str = "Answer the question from the passages, in a few words."
    answer_prefix: str = "Answer:"

    def __post_init__(self) -> None:
        _at_least("rag.chunk_tokens", self.chunk_tokens, 16, "tokens")
        _at_least("rag.top_k", self.top_k, 1, "passages")
        _at_least("rag.max_document_bytes", self.max_document_bytes, 1, "bytes")
        _at_least("rag.max_new_tokens", self.max_new_tokens, 1, "tokens")


@dataclass(frozen=True)
class ServerConfig:
    """The gRPC service.

    Args:
        address: ``host:port`` to listen on; port 0 takes a free one.
        data_dir: catalog, index and stored KV of this service; ``None`` means ``cache_dir() / "server"``.
        max_queue: requests that may wait for the engine before new ones are refused.
        max_message_bytes: largest gRPC message.
        drain_seconds: how long a shutdown waits for running requests.
        engine, rag: their own settings.
    """

    address: str = "127.0.0.1:50061"
    data_dir: str | Path | None = None
    max_queue: int = 64
    max_message_bytes: int = 16 * MiB
    drain_seconds: int = 20
    engine: EngineConfig = EngineConfig()
    rag: RagConfig = RagConfig()

    def __post_init__(self) -> None:
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not _is_port(port):
            raise InvalidConfig("address", self.address, "host:port with a port from 0 to 65535")
        _at_least("max_queue", self.max_queue, 1, "requests")
        _at_least("max_message_bytes", self.max_message_bytes, 1024, "bytes")
        _at_least("drain_seconds", self.drain_seconds, 0, "seconds")

    @property
    def path(self) -> Path:
        """The service's data directory."""
        return Path(self.data_dir).expanduser() if self.data_dir is not None else cache_dir() / "server"


@dataclass(frozen=True)
class ConnectorConfig:
    """The connector in another engine: its own part of that engine's configuration.

    Args:
        model: what the native engine would call the model, where that is another name than the engine's own: a model's
            shipped calibration goes by it.
        sink: see :class:`EngineConfig`.
        kernels: see :class:`EngineConfig`.
        scratch_tokens: longest prompt that is blended, for one is laid out on a canvas of its own; ``None`` means
            the engine's longest.
        capture_tokens: most tokens of missing chunks that are encoded in one idle step of the engine; 0 encodes none.
        capture_queue: most missing chunks that wait to be encoded.
        store: the tiered store.
    """

    model: str | None = None
    sink: str | tuple[int, ...] = "bos"
    kernels: Literal["auto", "torch", "triton", "reference"] = "auto"
    scratch_tokens: int | None = None
    capture_tokens: int = 8192
    capture_queue: int = 256
    store: StoreConfig = StoreConfig()

    def __post_init__(self) -> None:
        if self.scratch_tokens is not None:
            _at_least("scratch_tokens", self.scratch_tokens, 1, "tokens")
        _at_least("capture_tokens", self.capture_tokens, 0, "tokens")
        _at_least("capture_queue", self.capture_queue, 1, "chunks")
        EngineConfig(kernels=self.kernels, sink=self.sink)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ConnectorConfig:
        """Return the settings that plain values from JSON name; ``store.secret`` is hexadecimal there.

        Raises:
            InvalidConfig: an unknown name, or a value that is not allowed.
        """
        found = dict(values)
        store = dict(found.pop("store", {}))
        if isinstance(store.get("secret"), str):
            store["secret"] = _from_hex(store["secret"])
        if store.get("mooncake") is not None:
            store["mooncake"] = _made("store.mooncake", MooncakeConfig, store["mooncake"])
        if isinstance(found.get("sink"), list):
            found["sink"] = tuple(found["sink"])
        return _made("connector", cls, {**found, "store": _made("store", StoreConfig, store)})


def _made(name: str, kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    if unknown := [value for value in values if value not in known]:
        raise InvalidConfig(name, ", ".join(map(str, unknown)), f"the settings {', '.join(known)}")
    return kind(**values)


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidConfig("store.secret", "…", "hexadecimal digits") from None

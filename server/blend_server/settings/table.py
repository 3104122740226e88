"""The flags of ``blend-server``: a line for each. The parser, the variables and the names in errors are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blend.config import MOONCAKE_ADMIN_PORT, MOONCAKE_PROTOCOLS

# Messages hold counts of 32 bits, and gRPC's own limit on a message has as many.
MOST_COUNT = (1 << 31) - 1
VARIABLES = "BLEND_SERVER_"
"""What the variables' names begin with."""


@dataclass(frozen=True)
class Flag:
    """One flag, for a setting or, with ``words``, for whether an optional section is there.

    Attributes:
        name: without its dashes.
        path: of its setting; a setting without a flag is set by the file.
        text: what ``--help`` says; the default is added to it.
        metavar: what stands for its value there; ``None`` goes by the setting's kind.
        default: what is said of a default that is ``None``.
        most: the largest number that it takes, unless that is the kind's.
        ascii: whether it is ASCII alone, as addresses are.
        any_text: whether its text may be anything, as a name may that can be a path too.
        words: what it may be, and what that stands for: ``{}`` has the section, ``None`` has it not.
    """

    name: str
    path: str
    text: str
    metavar: str | None = None
    default: str | None = None
    most: int | None = None
    ascii: bool = False
    any_text: bool = False
    words: Mapping[str, object] | None = None

    @property
    def option(self) -> str:
        """How it is written on the command line."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The variable that stands for it."""
        return VARIABLES + self.name.upper().replace("-", "_")


_SERVING = (
    Flag("address", "address", "where to listen; port 0 takes a free one", "HOST:PORT", ascii=True),
    Flag(
        "data-dir",
        "data_dir",
        "documents, index and stored KV",
        "DIR",
        default="server in $BLEND_CACHE, or in ~/.cache/blend",
    ),
    Flag("max-queue", "max_queue", "requests that may wait for the model"),
    Flag("max-message-bytes", "max_message_bytes", "largest gRPC message", most=MOST_COUNT),
    Flag("drain-seconds", "drain_seconds", "time for running requests at a stop"),
    Flag("ready-file", "ready_file", "write the bound address here once requests are served"),
)
_OPERATIONS = (
    Flag("log-level", "operations.log_level", "least severe messages that go to standard error"),
    Flag("log-format", "operations.log_format", "how: lines of key=value, or an object of JSON a line"),
    Flag(
        "metrics-address",
        "operations.metrics_address",
        "where to serve Prometheus metrics of all tenants, unencrypted and to everyone",
        "HOST:PORT",
        default="nowhere",
        ascii=True,
    ),
    Flag(
        "traces",
        "operations.traces",
        "OpenTelemetry collector (OTLP over gRPC) that spans are sent to; needs blendkv[otel]",
        "URL",
        default="no spans",
    ),
    Flag(
        "shadow-share",
        "engine.shadow.share",
        "of the blended requests, how many are also run at full prefill, later, to tell how close they came",
    ),
    Flag(
        "shadow-max-kl",
        "engine.shadow.max_kl",
        "mean KL, in nats, from which the method auto runs full prefill",
        default="nothing stops it",
    ),
)
_SECURITY = (
    Flag("tls-cert", "security.tls.certificate", "the server's certificate and its issuers', in PEM"),
    Flag("tls-key", "security.tls.key", "its private key in PEM; not readable by others"),
    Flag(
        "tls-client-ca",
        "security.tls.client_ca",
        "certificates in PEM that those of clients must be signed by: mutual TLS",
        default="clients need none",
    ),
    Flag(
        "access-file",
        "security.access_file",
        "tokens, clients' certificates and tenants, in YAML; tokens come from python -m blend_server.tokens",
        default="everyone who reaches the address may do everything",
    ),
    Flag(
        "insecure-listen",
        "security.insecure_listen",
        "listen beyond this machine even without encryption and an access file",
    ),
    Flag("audit-file", "security.audit_file", "a line of JSON for each call; - is standard error", default="none"),
    Flag("max-open-tenants", "security.max_open_tenants", "tenants whose indexes are kept in memory"),
    Flag(
        "tenant-kv-bytes",
        "engine.store.tenant_quota_bytes",
        "most KV of a tenant in each tier",
        default="no limit but the tier's",
    ),
)
_ENGINE = (
    Flag("model", "engine.model", "a name, a directory in transformers format, or a hub id", any_text=True),
    Flag("device", "engine.device", "auto, cpu or cuda"),
    Flag("dtype", "engine.dtype", "auto, float32, bfloat16 or float16"),
    Flag("threads", "engine.threads", "CPU threads", default="torch's choice"),
    Flag("max-running", "engine.max_running", "requests that are computed together"),
    Flag("max-waiting", "engine.max_waiting", "requests that may wait to begin"),
    Flag(
        "shared-rows",
        "engine.shared_rows",
        "rows of prompts in a pass that other requests wait for",
        default="256 on a CPU, 2048 on a GPU",
    ),
    Flag("host-bytes", "engine.store.host_bytes", "KV in memory; 0 leaves that tier out"),
    Flag("disk-bytes", "engine.store.disk_bytes", "KV on disk; 0 leaves that tier out"),
)
_VLLM = (
    Flag("engine", "vllm", "what generates; vllm needs blendkv[vllm]", words={"native": None, "vllm": {}}),
    Flag("max-model-len", "vllm.max_model_len", "tokens of prompt and answer", default="the model's context"),
    Flag(
        "kv-cache-bytes",
        "vllm.kv_cache_bytes",
        "vLLM's paged KV cache",
        default="vLLM's choice; 2 GiB on a CPU",
    ),
    Flag("vllm-args", "vllm.args", "more arguments of vLLM's engine, such as enforce_eager", default="none"),
)
_MOONCAKE = (
    Flag("mooncake", "engine.store.mooncake.master", "its master; needs blendkv[mooncake]", "HOST:PORT", ascii=True),
    Flag(
        "mooncake-health",
        "engine.store.mooncake.health",
        "the master's admin pages",
        "HOST:PORT",
        default=f"its port {MOONCAKE_ADMIN_PORT}",
        ascii=True,
    ),
    Flag("mooncake-hostname", "engine.store.mooncake.hostname", "where other servers reach this one", "HOST"),
    Flag("mooncake-protocol", "engine.store.mooncake.protocol", " or ".join(MOONCAKE_PROTOCOLS)),
    Flag(
        "mooncake-segment-bytes",
        "engine.store.mooncake.segment_bytes",
        "memory that this server lends to the store",
    ),
    Flag(
        "secret-file",
        "engine.store.secret_file",
        "what keys the names of stored chunks, the same on all servers of one store; mode 0600",
        default="drawn at random and kept in the data directory",
    ),
)
_RESIDENCY = (
    Flag("residency-node", "engine.store.residency.node", "this server's name; begins to publish", "NAME"),
    Flag("residency-publish", "engine.store.residency.publish", "where, such as tcp://10.0.0.7:5557", "ENDPOINT"),
    Flag("residency-replay", "engine.store.residency.replay", "where the last events can be asked for", "ENDPOINT"),
    Flag(
        "residency-follow",
        "engine.store.residency.sources",
        "where another server publishes and, after a comma, where its last events can be asked for; may be repeated",
        "ENDPOINTS",
        default="none",
    ),
)
_DOCUMENTS = (
    Flag("chunk-tokens", "rag.chunk_tokens", "most tokens of a chunk"),
    Flag("neighbours", "rag.neighbours", "nearest chunks that each chunk is encoded behind in idle time, at most 10"),
    Flag("embedding-model", "rag.embedding_model", "for retrieval", "NAME", any_text=True),
    Flag("max-document-bytes", "rag.max_document_bytes", "largest document"),
    Flag("top-k", "rag.top_k", "passages unless a question says otherwise"),
    Flag("max-new-tokens", "rag.max_new_tokens", "likewise, longest answer"),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "serving": _SERVING,
    "who may call": _SECURITY,
    "what an operator sees": _OPERATIONS,
    "model and store": _ENGINE,
    "vLLM as the engine": _VLLM,
    "sharing chunks through a Mooncake store": _MOONCAKE,
    "telling other servers and routers which chunks are here": _RESIDENCY,
    "documents and answers": _DOCUMENTS,
}
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
BY_PATH = {flag.path: flag for flag in FLAGS}
BY_VARIABLE = {flag.variable: flag for flag in FLAGS}

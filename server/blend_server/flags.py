"""The flags of ``blend-server``, and the settings that they stand for."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from blend.config import (
    MOONCAKE_ADMIN_PORT,
    MOONCAKE_PROTOCOLS,
    RESIDENCY_LOOPBACK,
    EngineConfig,
    MooncakeConfig,
    RagConfig,
    ResidencyConfig,
    ResidencySource,
    ServerConfig,
    StoreConfig,
    VllmEngineConfig,
)
from blend.errors import InvalidConfig, InvalidInput
from blend.sizes import MOST_BYTES, parse_size, show_size
from blend_server import security_flags

_EPILOG = """\
examples:
  blend-server
  blend-server --address 127.0.0.1:0 --data-dir ./data --ready-file ./address
  blend-server --address 0.0.0.0:50061 --tls-cert server.pem --tls-key server.key --access-file access.yaml
  blend-server --model Qwen/Qwen3-0.6B --dtype bfloat16 --host-bytes 8GiB --disk-bytes 100GiB
  blend-server --engine vllm --dtype bfloat16 --vllm-args '{"enforce_eager": true}'
  (umask 077; head -c 32 /dev/urandom >./secret)   # once; the same file for all servers that share chunks
  blend-server --mooncake 10.0.0.5:50051 --mooncake-segment-bytes 8GiB --secret-file ./secret

Without --tls-cert and --access-file the server neither encrypts nor asks who is calling, and listens on this machine
alone. SIGTERM and SIGINT stop it cleanly; a second one ends it at once.
"""

_MAX_SECRET = 4096
_MAX_TEXT = 1024
# Messages hold counts of 32 bits, and gRPC's own limit on a message has as many.
_MOST_COUNT = _MOST_MESSAGE = (1 << 31) - 1
_PATHS = ("data_dir", "ready_file", "secret_file", "model", "embedding_model", *security_flags.PATHS)
_ADDRESSES = ("address", "mooncake", "mooncake_health")
# Settings whose flags are not called as they are.
_NAMES = {
    "mooncake.master": "mooncake",
    "residency.sources.address": "residency_follow",
    "residency.sources.replay_address": "residency_follow",
    "store.secret": "secret_file",
    **security_flags.NAMES,
    "vllm.args": "vllm_args",
}
_ONLY_VLLM = ("max_model_len", "kv_cache_bytes", "vllm_args")


def config(arguments: argparse.Namespace) -> ServerConfig:
    """The settings that the arguments stand for.

    Raises:
        InvalidConfig: a value is not allowed, or not with the others.
    """
    _check_texts(arguments)
    _check_ready_file(arguments.ready_file)
    return ServerConfig(
        address=arguments.address,
        data_dir=_data_dir(arguments.data_dir),
        max_queue=arguments.max_queue,
        max_message_bytes=arguments.max_message_bytes,
        drain_seconds=arguments.drain_seconds,
        security=security_flags.config(arguments),
        vllm=_vllm(arguments),
        engine=EngineConfig(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            threads=arguments.threads,
            store=StoreConfig(
                host_bytes=arguments.host_bytes,
                disk_bytes=arguments.disk_bytes,
                secret=_secret(arguments.secret_file) if arguments.secret_file is not None else None,
                mooncake=_mooncake(arguments),
                residency=_residency(arguments),
                tenant_quota_bytes=arguments.tenant_kv_bytes,
            ),
        ),
        rag=RagConfig(
            chunk_tokens=arguments.chunk_tokens,
            embedding_model=arguments.embedding_model,
            top_k=arguments.top_k,
            max_document_bytes=arguments.max_document_bytes,
            max_new_tokens=arguments.max_new_tokens,
        ),
    )


def in_flags(error: InvalidConfig) -> InvalidConfig:
    """The same error about flags, where settings are to blame that flags stand for."""
    known = vars(parser().parse_args([]))
    fields = []
    for field in error.field.split(", "):
        name = _NAMES.get(field, re.sub("^(store|rag|vllm)[.]", "", field).replace(".", "_"))
        fields.append(_flags("", [name]) if name in known else field)
    return InvalidConfig(", ".join(fields), error.value, error.allowed)


def _check_texts(arguments: argparse.Namespace) -> None:
    """Refuse text that no name and no address can be."""
    if not arguments.embedding_model:
        raise InvalidConfig("--embedding-model", "", "a name, or a directory")
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or name in _PATHS:
                continue
            if not text.isprintable() or len(text) > _MAX_TEXT or (name in _ADDRESSES and not text.isascii()):
                what = "ASCII text" if name in _ADDRESSES else "text"
                raise InvalidConfig(_flags("", [name]), text, f"printable {what} of at most {_MAX_TEXT} characters")


def _check_ready_file(path: str | None) -> None:
    if path is not None and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK | os.X_OK)):
        raise InvalidConfig("--ready-file", path, "a file in a directory that is there and can be written")


def _data_dir(path: str | None) -> str | None:
    if path is not None and (not path or os.path.expanduser(path).startswith("~")):
        raise InvalidConfig("--data-dir", path, "the path of a directory; ~ stands for a user's that there is")
    return path


def _vllm(arguments: argparse.Namespace) -> VllmEngineConfig | None:
    given = {name: value for name in _ONLY_VLLM if (value := getattr(arguments, name)) is not None}
    if arguments.engine == "vllm":
        return VllmEngineConfig(**{name.removeprefix("vllm_"): value for name, value in given.items()})
    if given:
        raise InvalidConfig("--engine", arguments.engine, f"vllm, with {_flags('', given)}")
    return None


def _mooncake(arguments: argparse.Namespace) -> MooncakeConfig | None:
    given = _given(arguments, "mooncake_")
    if arguments.mooncake is None:
        if given:
            raise InvalidConfig("--mooncake", None, f"HOST:PORT of a master, with {_flags('mooncake_', given)}")
        return None
    if arguments.secret_file is None:
        raise InvalidConfig(
            "--secret-file", None, "a file of at least 16 random bytes, the same for all servers of one Mooncake store"
        )
    if arguments.mooncake_health == arguments.mooncake:
        raise InvalidConfig("--mooncake-health", arguments.mooncake_health, "another address than that of --mooncake")
    return MooncakeConfig(arguments.mooncake, **given)


def _residency(arguments: argparse.Namespace) -> ResidencyConfig | None:
    given = _given(arguments, "residency_")
    sources = given.pop("follow", [])
    node = given.pop("node", None)
    if node is None:
        if sources or given:
            named = _flags("residency_", [*given, *(["follow"] if sources else [])])
            raise InvalidConfig("--residency-node", None, f"this server's name, with {named}")
        return None
    config = ResidencyConfig(node, **given, sources=tuple(ResidencySource(*text.split(",", 1)) for text in sources))
    own = config.publish
    if own == config.replay and not own.endswith(":*"):
        raise InvalidConfig("--residency-replay", own, "another endpoint than that of --residency-publish")
    if own in [source.address for source in config.sources]:
        raise InvalidConfig("--residency-follow", own, "another server's endpoint, not that of --residency-publish")
    return config


def _given(arguments: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The flags of a group that were given, by the settings' names."""
    return {
        name.removeprefix(prefix): value
        for name, value in vars(arguments).items()
        if name.startswith(prefix) and value is not None
    }


def _flags(prefix: str, names: Iterable[str]) -> str:
    return ", ".join(f"--{prefix}{name}".replace("_", "-") for name in sorted(names))


def _secret(path: str) -> bytes:
    """The bytes of a file that its owner alone may read.

    Raises:
        InvalidConfig: it is none, or holds too few or too many bytes.
    """
    allowed = f"a file of 16 to {_MAX_SECRET} bytes that belongs to you, mode 0600"
    try:
        handle = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                what = f"mode {stat.filemode(found.st_mode)}, of user {found.st_uid}"
                raise InvalidConfig("--secret-file", f"{path}, {what}", allowed)
            secret = file.read(_MAX_SECRET + 1)
    except OSError as error:
        raise InvalidConfig("--secret-file", f"{path}, {error.strerror}", allowed) from error
    if not 16 <= len(secret) <= _MAX_SECRET:
        raise InvalidConfig("--secret-file", f"{path}, {found.st_size} bytes", allowed)
    return secret


def _size(text: str, most: int = MOST_BYTES) -> int:
    try:
        return parse_size(text, most)
    except InvalidInput as error:
        raise _refused(error) from error


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a JSON object")
    return found


def _count(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_TEXT and int(digits) <= _MOST_COUNT):
        raise _refused(InvalidInput("count", text, f"a whole number from 0 to {_MOST_COUNT}"))
    return int(digits)


def _refused(error: InvalidInput) -> argparse.ArgumentTypeError:
    """The error for the parser, which names the flag itself."""
    return argparse.ArgumentTypeError(str(error).removeprefix(f"{error.field}: "))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        self.exit(2, f"{self.prog}: {said.removeprefix('argument ')} (see --help)\n")


def parser() -> argparse.ArgumentParser:
    base = ServerConfig()
    engine, rag, store = base.engine, base.rag, base.engine.store
    parser = _Parser(
        "blend-server",
        description="Serves blend.v1.BlendService over gRPC: documents in, answers from precomputed KV out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(group: argparse._ArgumentGroup, flag: str, default: object, text: str, **options: object) -> None:
        shown = show_size(default) if options.get("metavar") == "SIZE" and isinstance(default, int) else default
        group.add_argument(flag, default=default, help=f"{text} (default: {shown})", **options)  # type: ignore[arg-type]

    message = partial(_size, most=_MOST_MESSAGE)
    serving = parser.add_argument_group("serving")
    add(serving, "--address", base.address, "where to listen; port 0 takes a free one", metavar="HOST:PORT")
    serving.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"documents, index and stored KV (default: {base.path}; $BLEND_CACHE moves it)",
    )
    add(serving, "--max-queue", base.max_queue, "requests that may wait for the model", type=_count, metavar="N")
    add(serving, "--max-message-bytes", base.max_message_bytes, "largest gRPC message", type=message, metavar="SIZE")
    add(serving, "--drain-seconds", base.drain_seconds, "time for running requests at a stop", type=_count, metavar="N")
    serving.add_argument("--ready-file", metavar="FILE", help="write the bound address here once requests are served")
    add(serving, "--log-level", "info", "to stderr", choices=("debug", "info", "warning", "error"))

    security_flags.add(parser, count=_count, size=_size)

    model = parser.add_argument_group("model and store")
    add(model, "--model", engine.model, "a name, a directory in transformers format, or a hub id")
    add(model, "--device", engine.device, "auto, cpu or cuda")
    add(model, "--dtype", engine.dtype, "auto, float32, bfloat16 or float16")
    model.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: torch's choice)")
    add(model, "--host-bytes", store.host_bytes, "KV in memory; 0 leaves that tier out", type=_size, metavar="SIZE")
    add(model, "--disk-bytes", store.disk_bytes, "KV on disk; 0 leaves that tier out", type=_size, metavar="SIZE")

    vllm = parser.add_argument_group("vLLM as the engine")
    add(vllm, "--engine", "native", "what generates; vllm needs blendkv[vllm]", choices=("native", "vllm"))
    vllm.add_argument(
        "--max-model-len", type=_count, metavar="N", help="tokens of prompt and answer (default: the model's context)"
    )
    vllm.add_argument(
        "--kv-cache-bytes",
        type=_size,
        metavar="SIZE",
        help="vLLM's paged KV cache (default: vLLM's choice; 2 GiB on a CPU)",
    )
    vllm.add_argument(
        "--vllm-args", type=_object, metavar="JSON", help="more arguments of vLLM's engine, such as enforce_eager"
    )

    shared = MooncakeConfig("localhost:50051")
    mooncake = parser.add_argument_group("sharing chunks through a Mooncake store")
    mooncake.add_argument("--mooncake", metavar="HOST:PORT", help="its master; needs blendkv[mooncake]")
    mooncake.add_argument(
        "--mooncake-health",
        metavar="HOST:PORT",
        help=f"the master's admin pages (default: its port {MOONCAKE_ADMIN_PORT})",
    )
    mooncake.add_argument(
        "--mooncake-hostname",
        metavar="HOST",
        help=f"where other servers reach this one (default: {shared.hostname})",
    )
    mooncake.add_argument("--mooncake-protocol", help=f"{' or '.join(MOONCAKE_PROTOCOLS)} (default: {shared.protocol})")
    mooncake.add_argument(
        "--mooncake-segment-bytes",
        type=_size,
        metavar="SIZE",
        help=f"memory that this server lends to the store (default: {shared.segment_bytes})",
    )
    mooncake.add_argument(
        "--secret-file",
        metavar="FILE",
        help="what keys the names of stored chunks, the same on all servers of one store; mode 0600 "
        "(default: drawn at random and kept in the data directory)",
    )

    residency = parser.add_argument_group("telling other servers and routers which chunks are here")
    residency.add_argument("--residency-node", metavar="NAME", help="this server's name; begins to publish")
    residency.add_argument(
        "--residency-publish",
        metavar="ENDPOINT",
        help=f"where, such as tcp://10.0.0.7:5557 (default: {RESIDENCY_LOOPBACK}, a free port)",
    )
    residency.add_argument(
        "--residency-replay",
        metavar="ENDPOINT",
        help=f"where the last events can be asked for (default: {RESIDENCY_LOOPBACK})",
    )
    residency.add_argument(
        "--residency-follow",
        action="append",
        metavar="ENDPOINTS",
        help="where another server publishes and, after a comma, where its last events can be asked for; "
        "may be repeated",
    )

    documents = parser.add_argument_group("documents and answers")
    add(documents, "--chunk-tokens", rag.chunk_tokens, "most tokens of a chunk", type=_count, metavar="N")
    add(documents, "--embedding-model", rag.embedding_model, "for retrieval", metavar="NAME")
    add(documents, "--max-document-bytes", rag.max_document_bytes, "largest document", type=_size, metavar="SIZE")
    add(documents, "--top-k", rag.top_k, "passages unless a question says otherwise", type=_count, metavar="N")
    add(documents, "--max-new-tokens", rag.max_new_tokens, "likewise, longest answer", type=_count, metavar="N")
    return parser

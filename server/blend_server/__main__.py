"""The command ``blend-server``."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from blend.config import EngineConfig, RagConfig, ServerConfig, StoreConfig
from blend.errors import BlendError, InvalidConfig

_EPILOG = """\
examples:
  blend-server
  blend-server --address 127.0.0.1:0 --data-dir ./data --ready-file ./address
  blend-server --model Qwen/Qwen3-0.6B --dtype bfloat16 --host-bytes 8GiB --disk-bytes 100GiB

The server neither encrypts nor asks who is calling: keep it on a loopback address, or behind a proxy that does.
SIGTERM and SIGINT stop it cleanly; a second one ends it at once.
"""

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``blend-server`` with ``argv`` (default: the process's arguments); returns the exit status.

    Prints one line with the bound address once it serves. Status: 0 after a clean stop, 1 if it cannot start, 2
    for a wrong setting, 130 when interrupted while it starts.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(),
        stream=sys.stderr,
        format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )
    try:
        return _serve(_config(arguments), arguments.ready_file)
    except InvalidConfig as error:
        sys.stderr.write(f"blend-server: {error}\n")
        return 2
    except (BlendError, OSError) as error:
        sys.stderr.write(f"blend-server: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(config: ServerConfig, ready_file: str | None) -> int:
    from blend_server.server import BlendServer  # brings torch, which --help and wrong settings need not wait for

    server = BlendServer(config)
    server.start()
    try:
        stopped = threading.Event()
        _stop_on_signals(stopped)
        sys.stdout.write(f"blend-server listening on {server.address}\n")
        sys.stdout.flush()
        if ready_file is not None:
            _write_atomically(Path(ready_file), f"{server.address}\n")
        stopped.wait()
    finally:
        server.stop()
    return 0


def _stop_on_signals(stopped: threading.Event) -> None:
    """Set ``stopped`` at the first SIGTERM or SIGINT; a second one does what it does by default."""

    def stop(number: int, frame: object) -> None:
        stopped.set()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _config(arguments: argparse.Namespace) -> ServerConfig:
    """The settings that the arguments stand for.

    Raises:
        InvalidConfig: a value is not allowed.
    """
    return ServerConfig(
        address=arguments.address,
        data_dir=arguments.data_dir,
        max_queue=arguments.max_queue,
        max_message_bytes=arguments.max_message_bytes,
        drain_seconds=arguments.drain_seconds,
        engine=EngineConfig(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            threads=arguments.threads,
            store=StoreConfig(host_bytes=arguments.host_bytes, disk_bytes=arguments.disk_bytes),
        ),
        rag=RagConfig(
            chunk_tokens=arguments.chunk_tokens,
            embedding_model=arguments.embedding_model,
            top_k=arguments.top_k,
            max_document_bytes=arguments.max_document_bytes,
            max_new_tokens=arguments.max_new_tokens,
        ),
    )


def _size(text: str) -> int:
    """``1.5GiB`` or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1073741824, 512MiB or 1.5GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def _shown(count: int) -> str:
    """The size in the largest unit that divides it."""
    unit, scale = max(((u, s) for u, s in _UNITS.items() if count % s == 0), key=lambda pair: pair[1])
    return f"{count // scale}{unit.replace('IB', 'iB')}"


def _parser() -> argparse.ArgumentParser:
    base = ServerConfig()
    engine, rag, store = base.engine, base.rag, base.engine.store
    parser = argparse.ArgumentParser(
        "blend-server",
        description="Serves blend.v1.BlendService over gRPC: documents in, answers from precomputed KV out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(group: argparse._ArgumentGroup, flag: str, default: object, text: str, **options: object) -> None:
        shown = _shown(default) if options.get("type") is _size and isinstance(default, int) else default
        group.add_argument(flag, default=default, help=f"{text} (default: {shown})", **options)  # type: ignore[arg-type]

    serving = parser.add_argument_group("serving")
    add(serving, "--address", base.address, "where to listen; port 0 takes a free one", metavar="HOST:PORT")
    serving.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"documents, index and stored KV (default: {base.path}; $BLEND_CACHE moves it)",
    )
    add(serving, "--max-queue", base.max_queue, "requests that may wait for the model", type=int, metavar="N")
    add(serving, "--max-message-bytes", base.max_message_bytes, "largest gRPC message", type=_size, metavar="SIZE")
    add(serving, "--drain-seconds", base.drain_seconds, "time for running requests at a stop", type=int, metavar="N")
    serving.add_argument("--ready-file", metavar="FILE", help="write the bound address here once requests are served")
    add(serving, "--log-level", "info", "to stderr", choices=("debug", "info", "warning", "error"))

    model = parser.add_argument_group("model and store")
    add(model, "--model", engine.model, "a name, a directory in transformers format, or a hub id")
    add(model, "--device", engine.device, "auto, cpu or cuda")
    add(model, "--dtype", engine.dtype, "auto, float32, bfloat16 or float16")
    model.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    add(model, "--host-bytes", store.host_bytes, "KV in memory; 0 leaves that tier out", type=_size, metavar="SIZE")
    add(model, "--disk-bytes", store.disk_bytes, "KV on disk; 0 leaves that tier out", type=_size, metavar="SIZE")

    documents = parser.add_argument_group("documents and answers")
    add(documents, "--chunk-tokens", rag.chunk_tokens, "most tokens of a chunk", type=int, metavar="N")
    add(documents, "--embedding-model", rag.embedding_model, "for retrieval", metavar="NAME")
    add(documents, "--max-document-bytes", rag.max_document_bytes, "largest document", type=_size, metavar="SIZE")
    add(documents, "--top-k", rag.top_k, "passages unless a question says otherwise", type=int, metavar="N")
    add(documents, "--max-new-tokens", rag.max_new_tokens, "likewise, longest answer", type=int, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The command ``blend-server``."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from blend.config import ServerConfig
from blend.errors import BlendError, InvalidConfig
from blend_server import settings
from blend_server.operations import logs

_FAILED_SECONDS = 1.0
"""How often the server is asked whether it has failed: a handler of signals cannot wait for two things."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``blend-server`` with ``argv`` (default: the process's arguments); returns the exit status.

    Prints one line with the bound address once it serves. Status: 0 after a clean stop, 1 if it cannot start
    or its engine fails, 2 for wrong settings, with a line on standard error for each, 130 when interrupted while it
    starts. With ``--check-config`` it prints the settings in YAML and serves nothing: status 0 or 2.
    """
    arguments = settings.parser().parse_args(argv)
    try:
        found = settings.read(arguments, os.environ)
        if arguments.check_config:
            found.check_files()
            sys.stdout.write(settings.shown(found))
            return 0
    except settings.Refused as refused:
        sys.stderr.writelines(f"blend-server: {error}\n" for error in refused.errors)
        return 2
    logs.configure(found.config.service.operations)
    try:
        return _serve(found.config.service, found.config.ready_file)
    except InvalidConfig as error:
        sys.stderr.write(f"blend-server: {found.renamed(error)}\n")
        return 2
    except (BlendError, OSError) as error:
        sys.stderr.write(f"blend-server: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(config: ServerConfig, ready_file: str | Path | None) -> int:
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
        while not stopped.wait(_FAILED_SECONDS) and not server.failed.is_set():
            pass
    finally:
        server.stop()
    return 1 if server.failed.is_set() else 0


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


if __name__ == "__main__":
    sys.exit(main())

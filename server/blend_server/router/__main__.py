"""The command ``blend-router``."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from blend.config import OperationsConfig
from blend.errors import BlendError, InvalidConfig
from blend_server.operations import logs
from blend_server.router import RouterConfig, flags
from blend_server.router.server import Router

_FAILED_SECONDS = 1.0
"""How often the router is asked whether it has failed: a handler of signals cannot wait for two things."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``blend-router`` with ``argv`` (default: the process's arguments); returns the exit status.

    Prints one line with the bound address once it listens. Status: 0 after a clean stop, 1 if it cannot start or fails,
    2 for a wrong setting.
    """
    arguments = flags.parser().parse_args(argv)
    logs.configure(OperationsConfig(log_level=arguments.log_level))
    try:
        return _serve(flags.config(arguments), arguments.ready_file)
    except InvalidConfig as error:
        sys.stderr.write(f"blend-router: {error}\n")
        return 2
    except (BlendError, OSError) as error:
        sys.stderr.write(f"blend-router: {error}\n")
        return 1


def _serve(config: RouterConfig, ready_file: str | None) -> int:
    stopped = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stopped.set())
    with Router(config) as router:
        sys.stdout.write(f"blend-router listening on {router.address}\n")
        sys.stdout.flush()
        if ready_file is not None:
            new = Path(f"{ready_file}.new")
            new.write_text(f"{router.address}\n", encoding="utf-8")
            new.replace(ready_file)
        while not stopped.wait(_FAILED_SECONDS) and not router.failed.is_set():
            pass
    return 1 if router.failed.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())

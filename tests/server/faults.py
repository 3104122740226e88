"""What goes wrong in tests on purpose: calls that are held, connections that are cut, waiting for what follows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import blend_server
from blend.config import ServerConfig
from blend.engine import Engine
from blend_server.engines import open_engine


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Return once the condition holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to pass")


class Hold:
    """Holds every call of a method until it is let go; ``entered`` is set once there is one."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.entered, self._go_on = threading.Event(), threading.Event()
        method = getattr(owner, name)

        def held(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            self._go_on.wait(60)
            return method(*arguments, **options)

        patch.setattr(owner, name, held)

    def let_go(self) -> None:
        self._go_on.set()


class Wire:
    """Connections to an address that can be cut, as they are when a client's machine goes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, name="test-wire", daemon=True).start()

    def cut(self) -> None:
        """Cut all of them, and take no more."""
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(one, other), name="test-wire", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


class Served:
    """The command ``blend-server`` on a data directory, to be killed or told to stop."""

    def __init__(self, model: Path, directory: Path, log: Path, *more: str) -> None:
        ready = log.with_suffix(".address")
        ready.unlink(missing_ok=True)
        arguments = ["--address", "127.0.0.1:0", "--data-dir", str(directory), "--ready-file", str(ready)]
        arguments += ["--model", str(model), "--dtype", "float32", "--threads", "1", "--chunk-tokens", "128"]
        arguments += ["--host-bytes", "64MiB", "--disk-bytes", "256MiB", "--max-new-tokens", "4"]
        arguments += ["--neighbours", "0", *more]
        root = Path(blend_server.__file__).parents[1]
        self.log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "blend_server", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
            )
        end = time.monotonic() + 120
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.01)
        self.address = ready.read_text().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


Serving: TypeAlias = Callable[..., Served]
"""Starts :class:`Served` with more flags."""


def watch_engines(patch: pytest.MonkeyPatch) -> list[Engine]:
    """The native engines of servers that are started from now on."""
    engines: list[Engine] = []

    def opened(settings: ServerConfig) -> Any:
        engine = open_engine(settings)
        assert isinstance(engine, Engine)
        engines.append(engine)
        return engine

    patch.setattr("blend_server.server.open_engine", opened)
    return engines

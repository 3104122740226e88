"""A real Mooncake master and owners of memory, each a process of its own, and a link between them that can stall."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from blend.errors import TierUnavailable
from blend.store.health import segments, sickness
from blend.store.mooncake import MooncakeConfig, library
from tests.conftest import IN_CI

PATIENCE = 30.0
LEASE_MS = 2000
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""
_PROXY = """
import selectors, socket, sys
host, _, port = sys.argv[1].rpartition(":")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
waiting = selectors.DefaultSelector()
waiting.register(listener, selectors.EVENT_READ)
while True:
    for ready, _ in waiting.select():
        if ready.fileobj is listener:
            one, other = listener.accept()[0], socket.create_connection((host, int(port)))
            waiting.register(one, selectors.EVENT_READ, other)
            waiting.register(other, selectors.EVENT_READ, one)
            continue
        try:
            data = ready.fileobj.recv(1 << 16)
        except OSError:
            data = b""
        if data:
            ready.data.sendall(data)
        elif ready.fileobj.fileno() >= 0:
            for end in (ready.fileobj, ready.data):
                waiting.unregister(end)
                end.close()
            break
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, condition: object, seconds: float = PATIENCE) -> None:
    """Wait until ``condition()`` holds."""
    end = monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert monotonic() < end, f"{what}: not within {seconds} s"
        sleep(0.02)


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop a process; returns once none of its threads runs any more."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


class Master:
    """A master; killed and started again at the same addresses on demand."""

    def __init__(self, *flags: str) -> None:
        self.rpc, self.admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        host, _, port = self.rpc.rpartition(":")
        self._process = subprocess.Popen(
            [
                str(Path(spec.origin).parent / "mooncake_master"),
                f"--rpc_address={host}",
                f"--rpc_port={port}",
                f"--metrics_host={host}",
                f"--metrics_port={self.admin.rpartition(':')[2]}",
                f"--default_kv_lease_ttl={LEASE_MS}",
                *self._flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for("the master's health page", lambda: not sickness(self.admin, 1.0))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Owner:
    """A process that lends memory to the store."""

    def __init__(self, master: Master, nbytes: int) -> None:
        before = segments(master.admin, 5.0).segments
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OWNER, master.rpc, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == b"0"
        wait_for("the owner's segment", lambda: segments(master.admin, 5.0).segments > before)

    def kill(self) -> None:
        """Let it die at once, as by ``kill -9``."""
        self._process.kill()
        self._close()

    def stall(self) -> None:
        """Let it answer nothing, its connections open."""
        _stop(self._process)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._close()

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


class Proxy:
    """A TCP relay to ``target`` that stops forwarding on demand, its connections open.

    A process of its own: joining a store holds the interpreter's lock, which a relay in here would wait for.
    """

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _PROXY, target], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"

    def stall(self) -> None:
        _stop(self._process)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def require_mooncake() -> None:
    """Skip, with the reason, where Mooncake is not installed; in CI that is a failure."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "3")
    try:
        library()
    except TierUnavailable as error:
        if IN_CI:
            pytest.fail(f"CI needs Mooncake: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Master]:
    """A master and one owner of 256 MiB, shared by tests that keep to a prefix of their own and break nothing."""
    require_mooncake()
    master = Master()
    master.start()
    owner = Owner(master, 256 << 20)
    yield master
    owner.stop()
    master.kill()


@pytest.fixture
def master() -> Iterator[Master]:
    """A master of a test's own, to be killed."""
    require_mooncake()
    master = Master()
    master.start()
    yield master
    master.kill()


def config_for(cluster: Master, **settings: object) -> MooncakeConfig:
    """Return settings for a client that notices faults quickly."""
    values = {
        "master": cluster.rpc,
        "health": cluster.admin,
        "staging_bytes": 8 << 20,
        "deadline_seconds": 2.0,
        "connect_seconds": PATIENCE,
        "health_seconds": 0.2,
        **settings,
    }
    return MooncakeConfig(**values)  # type: ignore[arg-type]

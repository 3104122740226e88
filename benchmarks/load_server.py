"""A ``blend-server`` in a process of its own, and made-up documents in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep

from made_up import sentences

from blend_server.client import Client, Document

_START_SECONDS = 180.0
_STOP_SECONDS = 60.0
_SAMPLE_SECONDS = 0.5

DOCUMENTS, WORDS = 24, 600
"""Documents, and words of each: enough for passages to differ from question to question."""


class Server:
    """A running server: its address, and the memory that its process has."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    def resident(self) -> int:
        """Bytes of memory that the process has now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise SystemExit("the server has ended")


@contextmanager
def serve(directory: Path, flags: Sequence[str]) -> Iterator[Server]:
    """Start a server on a free port of this machine, wait until it serves, and stop it at the end."""
    ready, log = directory / "address", directory / "server.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "blend_server", "--address", "127.0.0.1:0", "--ready-file", str(ready)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--data-dir", str(directory / "data"), "--log-level", "warning", *flags],
            stdout=output,
            stderr=output,
            env=os.environ,
        )
    try:
        waited = 0.0
        while not ready.exists():
            if process.poll() is not None or waited > _START_SECONDS:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
            sleep(0.1)
            waited += 0.1
        yield Server(process, ready.read_text().strip())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fill(server: Server) -> None:
    """Have the documents ingested, each with a code of its own."""
    documents = [
        Document(f"report {n}", f"The code of this report is {code('report', n)}. " + sentences(f"report {n}", WORDS))
        for n in range(DOCUMENTS)
    ]
    with Client(server.address) as client:
        for progress in client.ingest(documents):
            if progress.WhichOneof("stage") == "failed":
                raise SystemExit(f"{progress.document_id}: {progress.failed.message}")


def code(kind: str, number: int) -> str:
    """A code that no text but its own has."""
    return f"{kind.upper()}-{number * 7919 % 10007:05d}-{number:03d}"


@contextmanager
def sampled(server: Server) -> Iterator[list[int]]:
    """Note the server's memory at short intervals meanwhile."""
    samples, ended = [server.resident()], threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            samples.append(server.resident())

    thread = threading.Thread(target=sample, name="sampling")
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()

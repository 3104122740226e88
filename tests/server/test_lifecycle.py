"""Start, health, reflection, drain, stop, restart; the command blend-server as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import blend_server
from blend.config import RagConfig, ServerConfig
from blend.errors import Closed, InvalidConfig
from blend.types import Answer, Plan
from blend_server.__main__ import main
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.engines import open_engine
from blend_server.server import SERVICE_NAME, BlendServer

LIGHT = Document("light", "The lighthouse was built in 1888.", "Lighthouse")
QUERY = Plan("query", 0.15)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Start = Callable[..., BlendServer]


def ingest(client: Client, *documents: Document) -> list[str]:
    return [p.WhichOneof("stage") or "" for p in client.ingest(documents)]


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(12000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to pass")


def threads() -> set[threading.Thread]:
    """The threads that servers own."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("blend-")}


def test_health_and_reflection(tiny_server: BlendServer) -> None:
    with grpc.insecure_channel(tiny_server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
        found = ProtoReflectionDescriptorDatabase(channel).FindFileContainingSymbol(SERVICE_NAME)
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(names)
    assert found.name == "blend/v1/blend.proto"
    assert [method.name for method in found.service[0].method] == [
        "Ingest",
        "Answer",
        "Retrieve",
        "ListDocuments",
        "GetDocument",
        "DeleteDocument",
        "GetStats",
        "ResetQuality",
    ]


def test_a_stop_lets_running_requests_end_and_refuses_new_ones(start: Start) -> None:
    before = threads()
    server = start()
    with Client(server.address, retries=Retries.none()) as client, grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert next(watch).status == SERVING
        ingest(client, LIGHT)
        events = client.answer("When?", plan=QUERY, max_new_tokens=300)
        next(events)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert next(watch).status == NOT_SERVING
        with pytest.raises(ServiceError) as raised:
            client.stats()
        assert raised.value.code == "UNAVAILABLE"
        *_, last = events
        stopping.join()
    assert isinstance(last, Answer)
    assert len(last.token_ids) == 300 or last.finish_reason == "stop"
    assert threads() <= before


def test_a_stop_cancels_what_outlives_the_drain(start: Start) -> None:
    server = start(drain_seconds=0)
    hold = threading.Event()

    def waiting() -> Iterable[Document]:
        yield LIGHT
        hold.wait(60)

    with Client(server.address, retries=Retries.none()) as client:
        stream = client.ingest(waiting())
        next(stream)
        wait_for(lambda: client.stats().corpus.documents == 1)
        server.stop()
        with pytest.raises(ServiceError) as raised:
            list(stream)
        hold.set()
    assert raised.value.code in {"CANCELLED", "UNAVAILABLE"}


def test_a_server_whose_engine_fails_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []

    def opened(settings: ServerConfig) -> Any:
        engines.append(open_engine(settings))
        return engines[-1]

    def fail() -> None:
        raise ZeroDivisionError("a fault of the engine")

    monkeypatch.setattr("blend_server.server.open_engine", opened)
    server = start()
    with Client(server.address, retries=Retries.none()) as client, grpc.insecure_channel(server.address) as channel:
        ingest(client, LIGHT)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert next(watch).status == SERVING
        assert not server.failed.is_set()
        monkeypatch.setattr(engines[0]._scheduler, "_begin", fail)
        with pytest.raises(ServiceError, match="failed") as raised:
            client.ask("When?")
        assert raised.value.code == "UNAVAILABLE"
        assert next(watch).status == NOT_SERVING
        wait_for(server.failed.is_set)


class Failing:
    """A server whose engine fails at once."""

    address = "127.0.0.1:1"

    def __init__(self, settings: ServerConfig) -> None:
        self.failed = threading.Event()

    def start(self) -> None:
        self.failed.set()

    def stop(self) -> None:
        pass


def test_the_command_fails_when_its_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blend_server.server.BlendServer", Failing)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert main(["--data-dir", str(tmp_path)]) == 1
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_documents_and_their_kv_outlive_the_server(start: Start) -> None:
    server = start()
    with Client(server.address) as client:
        ingest(client, LIGHT)
        before = client.ask("When?", plan=QUERY)
    server.stop()
    server = start()
    with Client(server.address) as client:
        assert ingest(client, LIGHT) == ["unchanged"]
        after = client.ask("When?", plan=QUERY)
    assert [chunk.tier for chunk in after.report.chunks] == ["disk"]
    assert after.token_ids == before.token_ids


def test_an_address_that_cannot_be_bound_is_a_wrong_setting(start: Start, tiny_server: BlendServer) -> None:
    before = threads()
    with pytest.raises(InvalidConfig, match="free port"):
        start(address=tiny_server.address)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidConfig, match="free port"):
            start(address=f"127.0.0.1:{taken.getsockname()[1]}")
    assert threads() <= before


def test_a_server_starts_once_and_may_be_stopped_at_any_time(start: Start) -> None:
    BlendServer(ServerConfig(address="127.0.0.1:0")).stop()
    server = start()
    with pytest.raises(Closed):
        server.start()
    server.stop()
    server.stop()


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--address", "nowhere"], 2, "host:port"),
        (["--max-queue", "0"], 2, "--max-queue"),
        (["--dtype", "int4"], 2, "--dtype"),
        (["--model", "/nonexistent/model"], 1, "/nonexistent/model"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    arguments: list[str], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data-dir", str(tmp_path), *arguments]) == status
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--host-bytes", "many"], ["--log-level", "loud"], ["--max-queue", "x"]])
def test_arguments_of_the_wrong_kind(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_shows_the_defaults_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"(default: {ServerConfig.address})" in out
    assert "(default: 1GiB)" in out
    assert f"(default: {RagConfig.chunk_tokens})" in out


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(tiny_model_dir: Path, tmp_path: Path) -> None:
    ready = tmp_path / "address"
    arguments = ["--address", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"), "--model", str(tiny_model_dir)]
    root = Path(blend_server.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "blend_server", *arguments, "--dtype", "float32", "--ready-file", str(ready)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None)
        address = ready.read_text().strip()
        with Client(address) as client:
            assert ingest(client, LIGHT)[-1] == "stored"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out == f"blend-server listening on {address}\n"
    assert "event=stopped drained=true" in err
    assert "lighthouse" not in err.lower()
    assert list(tmp_path.glob(".address*")) == []

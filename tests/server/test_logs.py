"""Log lines: their shape, whose call they are about, and what must never be in them."""

from __future__ import annotations

import io
import json
import logging
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from blend.config import OperationsConfig, SecurityConfig
from blend.errors import InvalidConfig
from blend.types import Plan
from blend_server.client import Client, Document, ServiceError
from blend_server.operations import context, logs
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub
from blend_server.server import BlendServer
from tests.server.accounts import Accounts

Start = Callable[..., BlendServer]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is logged once :func:`configure` was called; logging is as before afterwards."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    for handler in handlers:
        root.removeHandler(handler)  # or it would be closed, which is pytest's own
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_json_has_the_message_and_its_pairs(stream: io.StringIO) -> None:
    logs.configure(OperationsConfig(log_format="json"), stream)
    token = context.request_id.set("r7")
    try:
        logging.getLogger("blend_server").info("event=reloaded what=%s error=%s", "access_file", "no such file, line 3")
        logging.getLogger("blend.store").warning("tiered: disk failed: a=b \n%s", "and more")
        logging.getLogger("blend").debug("not at this level")
    finally:
        context.request_id.reset(token)
    first, second = lines(stream)
    assert first["event"] == "reloaded" and first["what"] == "access_file" and first["error"] == "no such file, line 3"
    assert first["level"] == "INFO" and first["logger"] == "blend_server" and first["request_id"] == "r7"
    assert first["time"].endswith("+00:00") and first["message"].startswith("event=reloaded")
    assert "tenant" not in first and "trace_id" not in first
    assert second["message"].endswith("a=b \nand more") and "event" not in second


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_has_types_and_stack_and_no_message(stream: io.StringIO, log_format: Any) -> None:
    logs.configure(OperationsConfig(log_format=log_format), stream)
    try:
        try:
            raise KeyError("canary")
        except KeyError as error:
            raise ValueError("canary") from error
    except ValueError:
        logging.getLogger("blend").exception("background work failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError<-KeyError" in line and "test_logs.py" in line and "canary" not in line


def test_text_is_as_it_was(stream: io.StringIO) -> None:
    logs.configure(OperationsConfig(log_level="warning"), stream)
    logging.getLogger("blend_server").info("event=quiet")
    logging.getLogger("blend_server").warning("event=stopped drained=%s", "true")
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("time=20") and line.endswith("level=WARNING logger=blend_server event=stopped drained=true")


@pytest.mark.parametrize(("name", "value"), [("log_format", "xml"), ("log_level", "loud")])
def test_unknown_formats_and_levels_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"operations.{name}"):
        OperationsConfig(**{name: value})


CANARIES = ("zanzibarcontent", "zanzibartitle", "zanzibarquestion", "secret-of-acme-writer", "zanzibarstop")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_text_and_no_secret_in_any_log_metric_or_span(
    start: Start, tmp_path: Path, stream: io.StringIO, log_format: Any
) -> None:
    content, title, question, _, stop = CANARIES
    logs.configure(OperationsConfig(log_format=log_format, log_level="debug"), stream)
    accounts = Accounts(tmp_path / "access.yaml")
    token = accounts.token("acme-writer", "acme", "writer")
    security = SecurityConfig(access_file=accounts.write(), audit_file=tmp_path / "audit.jsonl")
    server = start(operations=OperationsConfig("127.0.0.1:0"), security=security)
    with Client(server.address, token=token) as client:
        list(client.ingest([Document("light", f"{content} " * 20, title), Document("bad", "\0" + content, title)]))
        client.ask(question, plan=Plan("query"), max_new_tokens=2)
        client.retrieve(question)
        with pytest.raises(ServiceError):
            client.ask(question, plan=Plan("query"), max_new_tokens=100_000)
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = BlendServiceStub(channel)  # type: ignore[no-untyped-call]
        sent = (("authorization", f"Bearer {token}"), ("x-request-id", "chosen-by-client"))
        list(stub.Answer(pb.AnswerRequest(question=question, stop=[stop], max_new_tokens=2), metadata=sent))
        with pytest.raises(grpc.RpcError):
            list(stub.Answer(pb.AnswerRequest(question=question), metadata=(("authorization", f"Bearer {token}x"),)))
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as page:
        metrics = page.read().decode()
    server.stop()
    logged = stream.getvalue()
    assert "chosen-by-client" in logged
    for where in (logged, metrics, (tmp_path / "audit.jsonl").read_text()):
        assert [canary for canary in CANARIES if canary in where] == []
    if log_format == "json":
        calls = [line for line in lines(stream) if line.get("event") == "rpc" and line["rpc"] == "Answer"]
        assert {line["code"] for line in calls} == {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED"}
        (chosen,) = [line for line in calls if line["request_id"] == "chosen-by-client"]
        assert chosen["tenant"] == "acme" and float(chosen["ms"]) > 0

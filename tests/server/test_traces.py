"""Spans from the client to the loading of layers, as a collector gets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from blend.config import OperationsConfig, ServerConfig
from blend.errors import InvalidConfig
from blend.types import Plan, Report, Timings
from blend_server.client import Client, Document, ServiceError, tracing
from blend_server.operations.observing import open_observer
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub
from blend_server.server import BlendServer

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
sdk = pytest.importorskip("opentelemetry.sdk.trace")

LIGHT = Document("light", "The lighthouse was built in 1888. " * 12, "Lighthouse")
PARTS = {"retrieve", "queue", "lookup", "fetch", "rotate", "select", "recompute", "decode"}
Start = Callable[..., BlendServer]


class Collector(service.TraceServiceServicer):  # type: ignore[misc, name-defined]
    """Keeps all spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return messages.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(made, server)
    made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None)


def test_an_answer_is_a_tree_from_the_client_to_its_layers(start: Start, collector: Collector) -> None:
    server = start(operations=OperationsConfig(traces=collector.url))
    tracer = sdk.TracerProvider().get_tracer("test")
    with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        list(client.ingest([LIGHT]))
        stub: Any = BlendServiceStub(channel)  # type: ignore[no-untyped-call]
        with tracer.start_as_current_span("caller") as caller:
            request = pb.AnswerRequest(question="When?", plan=pb.Plan(method="query"), max_new_tokens=3)
            *_, last = stub.Answer(request, metadata=(*tracing.headers(), ("x-request-id", "r1")))
        with pytest.raises(ServiceError):
            client.get("nothing")
    server.stop()
    (answer,) = collector.named("blend.v1.BlendService/Answer")
    assert answer.trace_id == caller.get_span_context().trace_id.to_bytes(16, "big")
    assert answer.parent_span_id == caller.get_span_context().span_id.to_bytes(8, "big")
    said = attributes(answer)
    assert said["blend.request_id"] == "r1" and said["blend.tenant"] == "default" and said["blend.mode"] == "query"
    assert said["rpc.grpc.status_code"] == 0 and said["blend.generated_tokens"] == len(last.answer.token_ids)
    children = {span.name: span for span in collector.spans if span.parent_span_id == answer.span_id}
    assert set(children) == PARTS
    for span in children.values():
        assert answer.start_time_unix_nano <= span.start_time_unix_nano + 5_000_000
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= answer.end_time_unix_nano + 5_000_000
    for name in ("fetch", "rotate"):
        layers = [{p.key: p.value for p in event.attributes} for event in children[name].events]
        assert [layer["blend.layer"].int_value for layer in layers] == [0, 1, 2, 3]
    (missing,) = collector.named("blend.v1.BlendService/GetDocument")
    assert attributes(missing)["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert missing.trace_id != answer.trace_id and not missing.parent_span_id
    (resource, *_) = collector.resources
    assert attributes(resource)["service.name"] == "blend-server"
    assert "lighthouse" not in str(collector.spans).lower()


def test_a_collector_that_is_away_costs_no_answer(start: Start) -> None:
    server = start(operations=OperationsConfig(traces="http://127.0.0.1:9"))
    with Client(server.address) as client:
        list(client.ingest([LIGHT]))
        assert client.ask("When?", plan=Plan("reuse"), max_new_tokens=2).report.mode == "reuse"
    server.stop()


def test_phases_stand_one_after_another_where_an_engine_tells_only_sums() -> None:
    from blend_server.operations.traces import _phases

    timings = Timings(queue=10, fetch=20, recompute=30, first_token=100)
    report = Report("query", "", 9, 3, 6, 1, 0.1, 0.3, 0.3, (), timings, 0.0)
    found = [(p.name, round(p.start, 3), round(p.end, 3)) for p in _phases(report, first=5.0)]
    assert found == [("queue", 4.94, 4.95), ("fetch", 4.95, 4.97), ("recompute", 4.97, 5.0)]


def test_traces_without_opentelemetry_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "blend_server.operations.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfig, match=r"operations.traces.*blendkv\[otel\]"):
        open_observer(OperationsConfig(traces="http://127.0.0.1:4317"))


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys; import blend_server.operations.observing as o; from blend.config import OperationsConfig as C;"
        "from blend_server.client.tracing import headers; o.open_observer(C());"
        "print(headers(), [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "() []"


def test_headers_need_a_current_span() -> None:
    assert tracing.headers() == ()
    with sdk.TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
        ((name, value),) = tracing.headers()
    assert name == "traceparent" and f"{span.get_span_context().trace_id:032x}" in value


@pytest.mark.parametrize("url", ["", "127.0.0.1:4317", "ftp://x", "http://", "http://a b", 4317])
def test_what_is_no_collector_is_refused(url: Any) -> None:
    with pytest.raises(InvalidConfig, match="operations.traces"):
        ServerConfig(operations=OperationsConfig(traces=url))

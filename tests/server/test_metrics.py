"""The page of metrics: what it counts, who sees it, and what a scrape survives."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from blend.config import OperationsConfig, SecurityConfig, ServerConfig
from blend.errors import Closed, InvalidConfig
from blend.model.decoder import Decoder
from blend.recompute.calibration import parse
from blend.recompute.cost import Work
from blend.recompute.found import Found, Probe
from blend.recompute.planner import Decision, PrefillSpeed, decide, give_up, settle
from blend.types import Plan, Usage
from blend_server import audit
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.operations import figures, page
from blend_server.operations.figures import Figures, Sources
from blend_server.operations.hot import HotChunks
from blend_server.operations.reasons import short
from blend_server.operations.sheet import Sheet
from blend_server.operations.tenants import TenantCounts
from blend_server.server import BlendServer
from blend_server.service import BlendService
from tests.server.accounts import Accounts
from tests.serving.fakes import FakeDecoder

LIGHT = Document("light", "The lighthouse was built in 1888. " * 12, "Lighthouse")
Start = Callable[..., BlendServer]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(address: str | None) -> Samples:
    """All samples of a page, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(v for (n, found), v in samples.items() if n == name and labels.items() <= dict(found).items())


def settled(server: BlendServer, name: str, expected: float, **labels: str) -> Samples:
    """The page once a metric has its value: a call is counted when it has ended, just after its client learns of it."""
    for _ in range(1000):
        found = scrape(server.metrics_address)
        if total(found, name, **labels) == expected:
            return found
        time.sleep(0.01)
    pytest.fail(f"{name} is {total(found, name, **labels)}")


@pytest.fixture
def server(start: Start) -> BlendServer:
    return start(operations=OperationsConfig("127.0.0.1:0"))


def test_an_answer_is_counted_in_all_its_parts(server: BlendServer) -> None:
    with Client(server.address) as client:
        list(client.ingest([LIGHT]))
        answers = [client.ask("When?", plan=Plan(method), max_new_tokens=4) for method in ("reuse", "query", "full")]
        with pytest.raises(ServiceError):
            client.get("nothing")
        stats = client.stats()
    found = settled(server, "blend_requests_total", 1, method="GetDocument", code="NOT_FOUND")
    assert value(found, "blend_requests_total", method="Answer", code="OK") == 3
    assert value(found, "blend_requests_in_flight", method="Answer") == 0
    assert value(found, "blend_ttft_seconds_count", mode="reuse") == 1
    assert value(found, "blend_answers_total", mode="query", reason="asked") == 1
    for part in ("retrieve", "queue", "lookup", "fetch", "rotate", "select", "recompute"):
        assert value(found, "blend_ttft_part_seconds_count", part=part) == 3
    assert value(found, "blend_chunks_total", outcome="hit", tier="host") >= 2
    assert value(found, "blend_read_bytes_total", tier="host") > 0
    assert value(found, "blend_prompt_tokens_total", kind="cached") > 0
    assert total(found, "blend_generated_tokens_total") == sum(len(answer.token_ids) for answer in answers)
    assert value(found, "blend_charged_ratio_count", mode="query") == 1
    assert value(found, "blend_tier_objects", tier="host") == stats.engine.tiers[0].objects > 0
    assert value(found, "blend_tier_up", tier="disk") == 1
    assert value(found, "blend_serving") == 1
    assert value(found, "blend_places") == server.config.max_queue + 1
    assert value(found, "blend_queue_requests", state="running") == 0
    assert value(found, "blend_memory_bytes", kind="held") == 0
    assert value(found, "blend_open_tenants") == 1
    assert value(found, "process_resident_memory_bytes") > 0
    (build,) = [dict(labels) for name, labels in found if name == "blend_build_info"]
    assert build["fingerprint"] == stats.environment.fingerprint and build["protocol"] == "blend.v1"
    assert not [name for name, _ in found if name.startswith("blend_tenant")]  # without an access file


def test_what_tenants_have_is_told_of_those_in_the_access_file_alone(start: Start, tmp_path: Path) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    token = accounts.token("acme-writer", "acme", "writer")
    other = accounts.token("umbrella-reader", "umbrella", "reader")
    security = SecurityConfig(access_file=accounts.write())
    server = start(operations=OperationsConfig("127.0.0.1:0"), security=security)
    with Client(server.address, token=token) as client, Client(server.address, token=other) as reader:
        list(client.ingest([LIGHT]))
        answer = client.ask("When?", max_new_tokens=2)
        reader.stats()
        with pytest.raises(ServiceError), Client(server.address, token="blend.nobody.x") as stranger:
            stranger.stats()
    found = settled(server, "blend_requests_total", 1, method="GetStats", code="UNAUTHENTICATED")
    assert value(found, "blend_tenant_requests_total", tenant="acme", code="OK") >= 2
    assert value(found, "blend_tenant_requests_total", tenant="umbrella", code="OK") == 1
    assert value(found, "blend_tenant_tokens_total", tenant="acme", kind="generated") == len(answer.token_ids)
    assert value(found, "blend_tenant_bytes", tenant="acme", tier="host") > 0
    tenants = {dict(labels).get("tenant") for name, labels in found if name.startswith("blend_tenant")}
    assert tenants == {"acme", "umbrella"}


def test_tenants_that_left_the_access_file_are_forgotten() -> None:
    counts = TenantCounts()
    for tenant in ("acme", "gone"):
        counts.called(tenant, "OK")
        counts.answered(tenant, Usage(5, 3, 2))
    calls, tokens = counts.snapshot({"acme"})
    assert calls == {("acme", "OK"): 1}
    assert tokens == {("acme", "prompt"): 5, ("acme", "cached"): 3, ("acme", "generated"): 2}
    assert counts.snapshot({"acme", "gone"})[0] == calls


def test_a_flood_is_counted_as_refused(start: Start) -> None:
    server = start(operations=OperationsConfig("127.0.0.1:0"), max_queue=1)
    with Client(server.address, retries=Retries.none()) as client:
        list(client.ingest([LIGHT]))
        refused = 0
        held = []
        for _ in range(8):
            answer = client.answer("When?", max_new_tokens=300)
            try:
                next(answer)
                held.append(answer)
            except ServiceError as error:
                refused += error.code == "RESOURCE_EXHAUSTED"
        for answer in held:
            answer.close()  # type: ignore[attr-defined]
    assert refused > 0
    settled(server, "blend_queue_refused_total", refused, method="Answer")


def test_a_server_that_starts_does_not_say_that_it_serves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(service: BlendService) -> Any:
        said.append(value(scrape(f"127.0.0.1:{ports[0]}"), "blend_serving"))
        return begin(service)

    @contextmanager
    def telling(*arguments: Any) -> Iterator[int]:
        with served(*arguments) as port:
            ports.append(port)
            yield port

    said: list[float] = []
    ports: list[int] = []
    begin, served = BlendService.start, page.served
    monkeypatch.setattr(BlendService, "start", starting)
    monkeypatch.setattr(page, "served", telling)
    server = start(operations=OperationsConfig("127.0.0.1:0"))
    said.append(value(scrape(server.metrics_address), "blend_serving"))
    assert said == [0, 1]


def test_the_page_goes_on_while_the_server_drains_and_ends_with_it(start: Start) -> None:
    server = start(operations=OperationsConfig("127.0.0.1:0"))
    address = server.metrics_address
    with Client(server.address) as client:
        list(client.ingest([LIGHT]))
        events = client.answer("When?", max_new_tokens=120)
        next(events)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        seen = next((True for _ in range(500) if value(scrape(address), "blend_serving") == 0), False)
        list(events)
        stopping.join()
    assert seen
    with pytest.raises(OSError, match="refused"):
        scrape(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "metrics.example:9464"])
def test_a_page_for_others_has_to_be_asked_for(address: str) -> None:
    operations = OperationsConfig(address)
    with pytest.raises(InvalidConfig, match=r"operations.metrics_address.*insecure_listen"):
        ServerConfig(operations=operations)
    assert ServerConfig(operations=operations, security=SecurityConfig(insecure_listen=True))


@pytest.mark.parametrize("address", ["", "9464", "127.0.0.1:", "127.0.0.1:65536", 9464])
def test_an_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(InvalidConfig, match="operations.metrics_address"):
        OperationsConfig(address)


def test_a_port_that_is_taken_is_said(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidConfig, match="operations.metrics_address"):
            start(operations=OperationsConfig(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_readers_that_stall_neither_hold_others_up_nor_the_end() -> None:
    with page.served("127.0.0.1:0", CollectorRegistry()) as port:
        stalled = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        assert scrape(f"127.0.0.1:{port}") == {}
    for connection in stalled:
        connection.close()


# ---------------------------------------------------------------------------------------------- the collector


def sources(stats: Callable[[], Any]) -> Sources:
    return Sources(stats, lambda: True, lambda: 0, 65, lambda: 1, lambda: None, frozenset)


def collected(stats: Callable[[], Any]) -> set[str]:
    return {family.name for family in Figures(sources(stats), HotChunks(), TenantCounts()).collect()}


def test_an_engine_that_cannot_tell_leaves_the_rest_of_the_page() -> None:
    def closed() -> Any:
        raise Closed("the engine is closed")

    assert {"blend_serving", "blend_places"} <= collected(closed)


def test_a_tier_that_cannot_tell_its_figures_has_none() -> None:
    filled = Sheet()
    down = SimpleNamespace(name="disk", down="no such directory", capacity_bytes=0)
    figures._tiers(filled, SimpleNamespace(tiers=[down]))  # type: ignore[arg-type]
    (family,) = filled
    assert [(s.name, s.labels, s.value) for s in family.samples] == [("blend_tier_up", {"tier": "disk"}, 0.0)]


def test_what_shadows_found_is_told_where_an_engine_has_them() -> None:
    quality = SimpleNamespace(
        compared=3, agreed=2, kl_sum=0.5, kl_buckets=((0.1, 1), (1.0, 3)), mean_kl=0.17, upper_kl=None
    )
    shadow = SimpleNamespace(run=3, failed=0, dropped=1, broken=0, pending=2, tripped=True, methods={"auto": quality})
    filled = Sheet()
    figures._shadow(filled, shadow)
    samples = {(s.name, s.labels.get("le", s.labels.get("outcome", ""))): s.value for f in filled for s in f.samples}
    assert samples["blend_shadow_kl_bucket", "0.1"] == 1 and samples["blend_shadow_kl_bucket", "+Inf"] == 3
    assert samples["blend_shadow_kl_sum", ""] == 0.5
    assert samples["blend_shadow_requests_total", "dropped"] == 1
    assert samples["blend_shadow_tripped", ""] == 1 and samples["blend_shadow_mean_kl", ""] == 0.17
    assert ("blend_shadow_upper_kl", "") not in samples


# ------------------------------------------------------------------------------------------------- the parts


def test_hot_chunks_are_known_window_by_window(caplog: pytest.LogCaptureFixture) -> None:
    hot = HotChunks(window=10)
    chunk = SimpleNamespace(outcome="hit", key="00aa")
    for number in range(5):
        assert hot.shares == ()
        hot.read([chunk, chunk, SimpleNamespace(outcome="hit", key=f"11{number}")])  # type: ignore[list-item]
    assert hot.shares == (0.5, 0.1, 0.1, 0.1, 0.1)
    assert "event=hot_chunk key=00aa share=0.500" in caplog.text
    hot.read([SimpleNamespace(outcome="miss", key="22")] * 20)  # type: ignore[arg-type]
    assert hot.shares[0] == 0.5


def test_the_reasons_of_plans_have_a_word_each() -> None:
    asked = decide(Plan("query"), None)
    uncalibrated = decide(Plan("auto"), None)
    automatic = replace(asked, automatic=True, max_charged=0.15)
    file = resources.files("blend.recompute") / "calibrations" / "smollm2-135m.json"
    known, speed = parse(file.read_bytes(), "the default model's"), PrefillSpeed(cast(Decoder, FakeDecoder()))

    def settled(cached: int, probe: int, text: int, exact: int = 0) -> Decision:
        mandatory, candidates = Work.at(range(cached, cached + text)), Work.at(range(exact, cached))
        found = Found(cached + text, cached, 4, mandatory, candidates, 0.0, lambda method: Probe(probe))
        return settle(automatic, Plan(), known, found, speed)

    little, nothing, costly = settled(100, 0, 9000), settled(0, 0, 9), settled(10, 1000, 90)
    prefix = settled(100, 0, 9, exact=100)
    lost = give_up(asked, "two chunks were lost while they were loaded: disk")
    said = [short(decision.reason) for decision in (asked, uncalibrated, little, nothing, costly, prefix, lost)]
    automatic_ones = ["little_saved", "nothing_stored", "choosing_too_costly", "exact_prefix"]
    assert said == ["asked", "uncalibrated", *automatic_ones, "chunks_lost"]
    assert short("calibrated mean KL 0.012 (at most 0.020) at ratio 0.1") == "calibrated"
    assert short("something new 17") == "other"


def test_lines_that_the_audit_log_loses_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.raiseExceptions", False)
    (tmp_path / "log").mkdir()
    before = audit.failures.count
    with audit.written(tmp_path / "log" / "audit.jsonl"):
        audit.Entry("Answer", "1", "peer").ended("OK")
        assert audit.failures.count == before
        (tmp_path / "log" / "audit.jsonl").unlink()
        (tmp_path / "log").rmdir()
        audit.Entry("Answer", "2", "peer").ended("OK")
    assert audit.failures.count == before + 1

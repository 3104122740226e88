"""The alarm on quality as the service shows it: under the call's id, in the figures, and reset by administrators."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from blend.config import EngineConfig, SecurityConfig, ShadowConfig, StoreConfig
from blend_server.client import Client, Document
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1 import blend_pb2_grpc
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.conftest import config
from tests.serving.fakes import wait_until
from tests.tiny import load_for_nothing, save_model

FERRY = Document("ferry", "The ferry leaves the north pier at nine. It carries forty cars. " * 4, "Ferry")


class Watched:
    """A server that compares every answer, whose ``auto`` blends and is stopped by the first two."""

    def __init__(self, directory: Path) -> None:
        model = save_model(directory / "model", max_position_embeddings=2048)
        kl = {"kl": 0.01, "kl_low": 0.0, "kl_high": 0.02}
        point = {"method": "random", "ratio": 0.1, "charged": 0.1, "top1": 1.0, **kl}
        file = {"version": 1, "model": "m", "data": "made up", "questions": 1, "default": point, "points": [point]}
        (model / "blend_calibration.json").write_text(json.dumps(file))
        self.accounts = Accounts(directory / "access.yaml")
        self.tokens = {role: self.accounts.token(f"the-{role}", "acme", role) for role in ("writer", "admin")}
        self.accounts.write()
        self.audit_file = directory / "audit.jsonl"
        engine = EngineConfig(
            model=str(model),
            dtype="float32",
            store=StoreConfig(host_bytes=64 << 20, disk_bytes=256 << 20, fsync=False),
            shadow=ShadowConfig(share=1.0, max_kl=1e-9, window=4, least=2),
        )
        security = SecurityConfig(access_file=self.accounts.path, audit_file=self.audit_file)
        self.server = BlendServer(config(model, directory / "data", engine=engine, security=security))

    def reset(self, role: str) -> pb.ResetQualityResponse:
        with grpc.insecure_channel(self.server.address) as channel:
            stub = blend_pb2_grpc.BlendServiceStub(channel)
            sent = (("authorization", f"Bearer {self.tokens[role]}"),)
            return stub.ResetQuality(pb.ResetQualityRequest(), metadata=sent)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    load_for_nothing(monkeypatch)
    made = Watched(tmp_path)
    with made.server:
        yield made


def test_auto_is_stopped_and_an_administrator_lets_it_go_on(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with Client(watched.server.address, token=watched.tokens["admin"]) as client:
        list(client.ingest([FERRY]))

        def shadow() -> dict[str, Any]:
            found: dict[str, Any] = client.stats().engine.details["shadow"]
            return found

        assert watched.reset("admin") == pb.ResetQualityResponse()
        with caplog.at_level(logging.INFO):
            for number in (1, 2):
                assert client.ask("When does it leave?").report.mode == "random"
                wait_until(lambda number=number: shadow()["run"] == number)
        assert shadow()["tripped"]
        report = client.ask("When does it leave?").report
        assert report.mode == "full"
        assert "quality has stopped auto" in report.reason

        with pytest.raises(grpc.RpcError) as raised:
            watched.reset("writer")
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert shadow()["tripped"]
        reply = watched.reset("admin")
        assert reply.was_stopped
        assert reply.since.startswith("20")
        assert reply.reason in report.reason
        assert client.ask("When does it leave?").report.mode == "random"

    lines = [record.getMessage() for record in caplog.records]
    answered = {line.split("request_id=")[1].split()[0] for line in lines if line.startswith("rpc=Answer")}
    compared = {line.split("request_id=")[1].split()[0] for line in lines if line.startswith("event=compared")}
    assert compared <= answered
    assert len(compared) == 2
    entries = [json.loads(line) for line in watched.audit_file.read_text().splitlines()]
    resets = [(entry["caller"], entry["code"]) for entry in entries if entry["method"] == "ResetQuality"]
    assert resets == [("token:the-admin", "OK"), ("token:the-writer", "PERMISSION_DENIED"), ("token:the-admin", "OK")]

"""Who may call what: tokens, roles, expiry, changes of the access file; the audit log; bytes that are no message."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blend.config import SecurityConfig, ServerConfig, TlsConfig
from blend.errors import InvalidConfig, InvalidInput, ResourceExhausted
from blend.rag.library import Library
from blend.types import Plan
from blend_server import audit, auth, tokens
from blend_server.client import Client, Document, Retries, ServiceError, main
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.conftest import config

LIGHT = Document("light", "The lighthouse was built in 1888.", "Lighthouse")
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["BlendService"].methods]


def code(call: Callable[..., Any], *arguments: Any) -> str:
    """What became of a call."""
    try:
        reply = call(*arguments)
        if isinstance(reply, Iterator):
            list(reply)
    except ServiceError as error:
        return error.code
    return "OK"


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to pass")


class Guarded:
    """A server with an access file, an audit log, and a token of each role for the tenant ``acme``."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.accounts = Accounts(directory / "access.yaml")
        self.tokens = {role: self.accounts.token(f"the-{role}", "acme", role) for role in tokens.ROLES}
        self.audit_file = directory / "audit.jsonl"
        self.accounts.write()
        security = SecurityConfig(access_file=self.accounts.path, audit_file=self.audit_file)
        self.server = BlendServer(config(model, directory / "data", security=security))

    def client(self, token: str | None) -> Client:
        return Client(self.server.address, token=token)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


@pytest.fixture(scope="module")
def guarded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tiny_model_dir, tmp_path_factory.mktemp("guarded"))
    with made.server:
        with made.client(made.tokens["writer"]) as client:
            list(client.ingest([LIGHT]))
        yield made


# ------------------------------------------------------------------------------------------------ who may


def test_every_rpc_has_a_role() -> None:
    assert sorted(auth.REQUIRED) == sorted(METHODS)


def test_what_no_table_lists_is_for_administrators() -> None:
    assert auth.Caller("t", "admin", "x").may("admin")
    with pytest.raises(auth.PermissionDenied, match="NewMethod needs the role admin"):
        auth.Caller("t", "writer", "x").require("NewMethod")


def test_nobody_is_let_in_by_default() -> None:
    with pytest.raises(LookupError):
        contextvars.Context().run(auth.caller.get)


@pytest.mark.parametrize(
    ("role", "allowed"),
    [("reader", "OK"), ("writer", "OK"), ("admin", "OK")],
)
def test_who_reads(guarded: Guarded, role: str, allowed: str) -> None:
    with guarded.client(guarded.tokens[role]) as client:
        assert code(client.stats) == allowed
        assert code(client.retrieve, "When?") == allowed
        assert code(client.get, LIGHT.id) == allowed
        assert code(client.documents) == allowed
        assert client.ask("When?", plan=Plan("query"), max_new_tokens=1).report.tokens > 0


@pytest.mark.parametrize(("role", "outcome"), [("reader", "PERMISSION_DENIED"), ("writer", "OK"), ("admin", "OK")])
def test_who_writes(guarded: Guarded, role: str, outcome: str) -> None:
    document = Document(f"of-{role}", "Some text.")
    with guarded.client(guarded.tokens[role]) as client:
        assert code(client.ingest, [document]) == outcome
        if outcome == "OK":
            assert code(client.delete, document.id) == "OK"
        else:
            with pytest.raises(ServiceError, match="DeleteDocument needs the role writer; token:the-reader"):
                client.delete(LIGHT.id)


@pytest.mark.parametrize("token", [None, "blend.nobody.x", "blend.the-admin.wrong", "nonsense", "blend.the-admin."])
def test_whoever_proves_nothing_is_turned_away(guarded: Guarded, token: str | None) -> None:
    with guarded.client(token) as client:
        for call in (client.stats, lambda: client.retrieve("When?"), lambda: client.ask("When?")):
            with pytest.raises(ServiceError) as raised:
                call()
            assert raised.value.code == "UNAUTHENTICATED"
            assert "authorization: Bearer" in raised.value.message


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Basic YTpi")],
        [("authorization", "Bearer")],
        [("authorization", "{token}")],
        [("authorization", "Bearer {token}"), ("authorization", "Bearer {token}")],
    ],
)
def test_a_header_of_another_kind_is_no_token(guarded: Guarded, metadata: list[tuple[str, str]]) -> None:
    sent = [(key, value.format(token=guarded.tokens["admin"])) for key, value in metadata]
    with grpc.insecure_channel(guarded.server.address) as channel:
        stub: Any = BlendServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.GetStats(pb.GetStatsRequest(), metadata=sent)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_needs_no_token(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.server.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_token_is_checked_once_however_many_use_it(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    token = guarded.accounts.token("busy", "acme", "reader")
    guarded.accounts.write()
    checks: list[str] = []
    check = tokens.Hash.matches

    def watched(hashed: tokens.Hash, secret: str) -> bool:
        checks.append(secret)
        time.sleep(0.1)
        return check(hashed, secret)

    monkeypatch.setattr(tokens.Hash, "matches", watched)
    with guarded.client(token) as client:
        wait_for(lambda: code(client.stats) == "OK")
        checks.clear()
        assert [code(client.stats) for _ in range(5)] == ["OK"] * 5
        assert checks == []
    with guarded.client("blend.busy.wrong") as client:
        calls = [threading.Thread(target=code, args=(client.stats,)) for _ in range(8)]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert len(checks) < 8


# ------------------------------------------------------------------------------------ changes of the file


def test_tokens_expire_go_and_come_while_the_server_runs(guarded: Guarded) -> None:
    soon = datetime.now(timezone.utc) + timedelta(seconds=4)
    token = guarded.accounts.token("brief", "acme", "reader", expires=soon)
    with guarded.client(token) as client:
        assert code(client.stats) == "UNAUTHENTICATED"
        guarded.accounts.write()
        wait_for(lambda: code(client.stats) == "OK")
        wait_for(lambda: code(client.stats) == "UNAUTHENTICATED")
        with pytest.raises(ServiceError, match="the token brief expired at"):
            client.stats()
        guarded.accounts.entries["tokens"].pop()
        guarded.accounts.write()
        wait_for(lambda: "is not valid" in str(_error(client)))


def _error(client: Client) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        client.stats()
    return raised.value


class _Call:
    """A call's context, as far as a gate looks at it."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def invocation_metadata(self) -> Any:
        return self._metadata


async def test_a_clock_that_jumps_decides_by_its_new_time(tmp_path: Path) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    noon = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
    call = _Call(accounts.token("a", "acme", "reader", expires=noon))
    now = [noon - timedelta(hours=1)]
    gate = auth.FileGate(accounts.write(), lambda: now[0])
    who = await gate.identify(call)
    now[0] = noon
    with pytest.raises(auth.Unauthenticated, match="expired"):
        await gate.identify(call)
    with pytest.raises(auth.Unauthenticated, match="expired"):
        await gate.recheck(who)
    now[0] = noon - timedelta(days=400)
    assert await gate.identify(call) == who
    await gate.recheck(who)
    await gate.close()


async def test_a_bounded_number_of_tokens_is_checked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    good = [accounts.token(f"t{n}", "acme", "reader") for n in range(10)]
    gate = auth.FileGate(accounts.write())
    assert (await gate.identify(_Call(good[0]))).name == "token:t0"
    hold = threading.Event()

    def slow(hashed: tokens.Hash, secret: str) -> bool:
        hold.wait(30)
        return False

    monkeypatch.setattr(tokens.Hash, "matches", slow)

    def guess(at: int, count: int) -> list[asyncio.Future[auth.Caller]]:
        return [asyncio.ensure_future(gate.identify(_Call(f"blend.t{at}.guess{n}"))) for n in range(count)]

    guesses = guess(0, 40)
    refused, _ = await asyncio.wait(guesses, timeout=1)
    assert len(refused) == 36  # all but a few at one token
    for at in range(1, 10):
        guesses += guess(at, 4)
    refused, _ = await asyncio.wait(guesses, timeout=1)
    assert len(refused) == 36 + 8
    assert all(isinstance(refusal.exception(), ResourceExhausted) for refusal in refused)
    assert (await gate.identify(_Call(good[0]))).name == "token:t0"
    hold.set()
    found = await asyncio.gather(*guesses, return_exceptions=True)
    assert sum(isinstance(error, auth.Unauthenticated) for error in found) == 32
    await gate.close()


async def test_the_file_is_read_again_while_a_token_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    good = _Call(accounts.token("a", "acme", "reader"))
    gate = auth.FileGate(accounts.write())
    who = await gate.identify(good)
    hold = threading.Event()
    monkeypatch.setattr(tokens.Hash, "matches", lambda *_: hold.wait(30) and False)
    guess = asyncio.ensure_future(gate.identify(_Call("blend.a.guess")))
    await asyncio.sleep(1.2)
    accounts.entries["tokens"].clear()
    accounts.token("b", "acme", "reader")
    accounts.write()
    with pytest.raises(auth.Unauthenticated, match="not valid any more"):
        await asyncio.wait_for(gate.recheck(who), 20)
    hold.set()
    with pytest.raises(auth.Unauthenticated):
        await guess
    await gate.close()


def test_a_role_changes_with_the_file(guarded: Guarded) -> None:
    token = guarded.accounts.token("promoted", "acme", "reader")
    guarded.accounts.write()
    with guarded.client(token) as client:
        wait_for(lambda: code(client.stats) == "OK")
        assert code(client.delete, "none") == "PERMISSION_DENIED"
        guarded.accounts.entries["tokens"][-1]["role"] = "writer"
        guarded.accounts.write()
        wait_for(lambda: code(client.delete, "none") == "NOT_FOUND")


def test_a_broken_file_changes_nothing_and_is_logged_once(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with guarded.client(guarded.tokens["admin"]) as client, caplog.at_level(logging.INFO):
        guarded.accounts.path.write_text("tokens: [{id: a, hash: tungsten}]")
        wait_for(lambda: client.stats() and "event=reload_failed what=access_file kept=previous" in caplog.text)
        time.sleep(1.2)
        client.stats()
        assert caplog.text.count("reload_failed") == 1
        assert "tungsten" not in caplog.text
        guarded.accounts.write()
        wait_for(lambda: client.stats() and "event=reloaded what=access_file" in caplog.text)


def test_a_stream_ends_when_its_token_goes(guarded: Guarded) -> None:
    token = guarded.accounts.token("going", "acme", "writer")
    guarded.accounts.write()
    gone = threading.Event()

    def documents() -> Iterable[Document]:
        yield Document("first", "The first text.")
        gone.wait(30)
        yield Document("second", "The second text.")

    with guarded.client(token) as client, guarded.client(guarded.tokens["admin"]) as other:
        wait_for(lambda: code(client.stats) == "OK")
        stream = client.ingest(documents())
        next(stream)
        guarded.accounts.entries["tokens"].pop()
        guarded.accounts.write()
        time.sleep(1.2)  # nobody calls meanwhile
        gone.set()
        with pytest.raises(ServiceError, match="not valid any more"):
            list(stream)
        assert code(other.get, "second") == "NOT_FOUND"
        other.delete("first")


# --------------------------------------------------------------------------------------------- the audit log


def test_the_audit_log_says_who_did_what_and_nothing_of_any_text(guarded: Guarded) -> None:
    start = len(guarded.lines())
    secret = Document("plans", "The password is tungsten.", "On tungsten")
    with guarded.client(guarded.tokens["writer"]) as client:
        list(client.ingest([secret, Document("empty", "")]))
        client.ask("What about tungsten?", max_new_tokens=1, plan=Plan("query"))
        client.delete("plans")
        code(client.get, "plans")
    with guarded.client("blend.the-admin.tungsten") as client:
        code(client.stats)
    wait_for(lambda: any(line["code"] == "UNAUTHENTICATED" for line in guarded.lines()[start:]))
    lines = guarded.lines()[start:]
    seen = [(line["method"], line["code"], line["document"]) for line in lines if line["method"] != "GetStats"]
    assert seen == [
        ("Ingest", "OK", "plans"),
        ("Ingest", "INVALID_ARGUMENT", "empty"),
        ("Ingest", "OK", None),
        ("Answer", "OK", None),
        ("DeleteDocument", "OK", "plans"),
        ("GetDocument", "NOT_FOUND", "plans"),
    ]
    by_writer = [line for line in lines if line["method"] != "GetStats"]
    assert {(line["tenant"], line["caller"]) for line in by_writer} == {("acme", "token:the-writer")}
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") and line["request_id"] for line in lines)
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in lines)
    assert (lines[-1]["tenant"], lines[-1]["caller"], lines[-1]["code"]) == (None, None, "UNAUTHENTICATED")
    assert "tungsten" not in guarded.audit_file.read_text()
    assert guarded.audit_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("method", ["commit", "delete"])
def test_the_audit_log_has_changes_whose_callers_left(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    start, reached, go_on = len(guarded.lines()), threading.Event(), threading.Event()
    change = getattr(Library, method)

    def slow(*arguments: Any) -> Any:
        reached.set()
        go_on.wait(30)
        return change(*arguments)

    sent = [("authorization", f"Bearer {guarded.tokens['writer']}")]
    with guarded.client(guarded.tokens["writer"]) as client, grpc.insecure_channel(guarded.server.address) as channel:
        if method == "delete":
            list(client.ingest([Document("left", "Some text.")]))
            start = len(guarded.lines())
        monkeypatch.setattr(Library, method, slow)
        stub: Any = BlendServiceStub(channel)
        if method == "delete":
            call = stub.DeleteDocument.future(pb.DeleteDocumentRequest(id="left"), metadata=sent)
        else:
            call = stub.Ingest(iter([pb.Document(id="left", content=b"Some text.")]), metadata=sent)
        assert reached.wait(30)
        call.cancel()
        wait_for(lambda: any(line["code"] == "CANCELLED" for line in guarded.lines()[start:]))
        assert [line["code"] for line in guarded.lines()[start:]] == ["CANCELLED"]
        go_on.set()
        wait_for(lambda: any(line["code"] == "OK" for line in guarded.lines()[start:]))
        assert guarded.lines()[-1]["document"] == "left"
        assert code(client.get, "left") == {"commit": "OK", "delete": "NOT_FOUND"}[method]
        monkeypatch.setattr(Library, method, change)
        code(client.delete, "left")


def test_no_secret_is_logged(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), guarded.client(guarded.tokens["reader"]) as client:
        client.stats()
        code(client.delete, "x")
    assert "secret-of" not in caplog.text
    assert "secret-of" not in guarded.audit_file.read_text()


def test_a_log_that_was_moved_away_is_begun_anew(guarded: Guarded) -> None:
    moved = guarded.audit_file.with_suffix(".1")
    os.rename(guarded.audit_file, moved)
    with guarded.client(guarded.tokens["reader"]) as client:
        client.stats()
    wait_for(guarded.audit_file.exists)
    assert guarded.audit_file.stat().st_mode & 0o777 == 0o600
    with moved.open("a") as file:
        file.write(guarded.audit_file.read_text())
    os.rename(moved, guarded.audit_file)


def test_a_log_that_cannot_be_begun_anew_fails_no_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    with audit.written(directory / "audit.jsonl"):
        entry = audit.Entry("GetStats", "job", "peer")
        entry.write("OK")
        os.rename(directory, tmp_path / "rotated")
        entry.write("OK")
        entry.write("OK")
        assert "FileNotFoundError" in capsys.readouterr().err
        directory.mkdir()
        entry.write("NOT_FOUND")
    assert [json.loads(line)["code"] for line in (directory / "audit.jsonl").open()] == ["NOT_FOUND"]


# ------------------------------------------------------------------------------------- bytes and fullness


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_are_an_invalid_argument(guarded: Guarded, data: bytes) -> None:
    sent = [("authorization", f"Bearer {guarded.tokens['admin']}")]
    with grpc.insecure_channel(guarded.server.address) as channel:
        for call in (
            channel.unary_unary("/blend.v1.BlendService/GetDocument"),
            channel.unary_stream("/blend.v1.BlendService/Answer"),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                list(reply) if isinstance(reply := call(data, metadata=sent), Iterable) else reply
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "message" in raised.value.details()
        stream = channel.stream_stream("/blend.v1.BlendService/Ingest")
        with pytest.raises(grpc.RpcError) as raised:
            list(stream(iter([data]), metadata=sent))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as raised:  # who is calling comes first
            channel.unary_unary("/blend.v1.BlendService/GetDocument")(data)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_random_bytes_on_the_port_do_no_harm(guarded: Guarded) -> None:
    host, _, port = guarded.server.address.rpartition(":")
    noise = random.Random(7)
    for size in (1, 24, 10_000, 10_000):
        with socket.create_connection((host, int(port))) as connection, suppress(ConnectionError):
            connection.sendall(noise.randbytes(size))
            connection.settimeout(1)
            with suppress(TimeoutError):
                while connection.recv(4096):
                    pass
    with guarded.client(guarded.tokens["reader"]) as client:
        assert code(client.stats) == "OK"


def test_a_refusal_for_now_says_when_to_try_again(
    start: Callable[..., BlendServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(max_queue=1)
    done = threading.Event()
    embed = Library.embed

    def slow(*arguments: Any) -> Any:
        done.wait(30)
        return embed(*arguments)

    monkeypatch.setattr(Library, "embed", slow)
    with Client(server.address, retries=Retries.none()) as client, grpc.insecure_channel(server.address) as channel:
        streams = [client.ingest([LIGHT]) for _ in range(2)]
        for stream in streams:
            next(stream)
        with pytest.raises(ServiceError) as refused:
            client.ask("When?")
        stub: Any = BlendServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Answer(pb.AnswerRequest(question="When?")))
        done.set()
        for stream in streams:
            list(stream)
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    assert refused.value.retry_seconds == 1.0
    status, retry = Status(), RetryInfo()
    status.ParseFromString(dict(raised.value.trailing_metadata())["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 1


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "blend.example:1"])
def test_a_server_listens_beyond_this_machine_only_with_tls_and_tokens_or_when_told_so(address: str) -> None:
    tls = TlsConfig("cert.pem", "key.pem")
    for security in (SecurityConfig(), SecurityConfig(tls=tls), SecurityConfig(access_file="access.yaml")):
        with pytest.raises(InvalidConfig, match="a loopback address"):
            ServerConfig(address=address, security=security)
    for security in (SecurityConfig(insecure_listen=True), SecurityConfig(tls=tls, access_file="access.yaml")):
        assert ServerConfig(address=address, security=security).address == address


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"])
def test_a_loopback_address_needs_nothing(address: str) -> None:
    assert ServerConfig(address=address).address == address


def test_a_server_does_not_start_with_a_file_that_lets_nobody_know(start: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="access_file"):
        start(security=SecurityConfig(access_file=tmp_path / "none"))
    with pytest.raises(InvalidConfig, match="audit_file"):
        start(security=SecurityConfig(audit_file=tmp_path / "none" / "audit"))


# ------------------------------------------------------------------------------------------------- client


def test_a_token_goes_to_another_machine_only_encrypted() -> None:
    with pytest.raises(InvalidInput, match="another machine"):
        Client("blend.example:50061", token="blend.a.secret")
    with pytest.raises(InvalidInput, match="printable") as raised:
        Client("127.0.0.1:1", token="a\nb")
    assert "a\\nb" not in str(raised.value)


def test_the_command_takes_a_token_from_a_file_or_the_environment(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = ["--address", guarded.server.address]
    (tmp_path / "token").write_text(guarded.tokens["reader"] + "\n")
    assert main(["stats", *address]) == 5
    assert main(["stats", *address, "--token-file", str(tmp_path / "token")]) == 0
    assert main(["delete", "light", *address, "--token-file", str(tmp_path / "token")]) == 5
    assert "needs the role writer" in capsys.readouterr().err
    assert main(["stats", *address, "--token-file", str(tmp_path / "none")]) == 2
    monkeypatch.setenv("BLEND_TOKEN", guarded.tokens["reader"])
    assert main(["stats", *address]) == 0
    (tmp_path / "empty").write_text("\n")
    assert main(["stats", *address, "--token-file", str(tmp_path / "empty")]) == 2

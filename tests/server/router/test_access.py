"""Who may call a router, and as whom it calls the engines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from blend.config import SecurityConfig, TlsConfig
from blend_server import check
from blend_server.client import Client, Document, Retries, ServiceError, Tls
from blend_server.router.server import Router
from tests.server.accounts import Accounts
from tests.server.certificates import Authority
from tests.server.router.conftest import Engines, ready
from tests.server.router.fakes import wait_for

FERRY = Document("ferry", "It leaves at nine.")


@pytest.fixture
def accounts(tmp_path: Path) -> Accounts:
    return Accounts(tmp_path / "access.yaml")


def test_a_token_goes_on_to_the_engines_and_decides_who_may_write(
    route: Callable[..., Router], engines: Engines, accounts: Accounts
) -> None:
    reader, writer = accounts.token("r", "acme", "reader"), accounts.token("w", "acme", "writer")
    address = route(security=SecurityConfig(access_file=accounts.write())).address
    with Client(address, token=writer) as client:
        ready(client, "a", "b")
        list(client.ingest([FERRY]))
    assert {metadata.get("authorization") for engine in engines for _, metadata in engine.calls} == {f"Bearer {writer}"}
    with Client(address, token=reader) as client:
        assert client.ask("When?") is not None
        with pytest.raises(ServiceError) as raised:
            client.delete("ferry")
        assert raised.value.code == "PERMISSION_DENIED"
    for token, code in (("blend.r.wrong", "UNAUTHENTICATED"), (None, "UNAUTHENTICATED")):
        with Client(address, token=token) as client, pytest.raises(ServiceError) as raised:
            client.stats()
        assert raised.value.code == code


def test_what_a_tenant_missed_waits_for_its_token_after_a_restart(
    route: Callable[..., Router], engines: Engines, accounts: Accounts
) -> None:
    """Tokens are never written down: without one the engine is not asked about that tenant."""
    reader, writer = accounts.token("r", "acme", "reader"), accounts.token("w", "acme", "writer")
    security = SecurityConfig(access_file=accounts.write())

    def only_writers(context: Any) -> None:
        sent = dict(context.invocation_metadata())
        if sent.get("authorization") != f"Bearer {writer}":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "Ingest needs the role writer")

    for engine in engines:
        engine.before["Ingest"] = only_writers
    with Client(route(security=security).address, token=writer) as client:
        ready(client, "a", "b")
        engines[1].stop()
        ready(client, "a")
        list(client.ingest([FERRY]))
    address = route(security=security).address
    with Client(address, token=reader) as client:
        engines[1].start()
        ready(client, "a")
        wait_for("the engine's refusal", lambda: engines[1].asked("Ingest"))
        ready(client, "a")
    with Client(address, token=writer) as client:
        ready(client, "a", "b")
    assert engines[1].texts() == engines[0].texts()


def test_what_a_tenant_missed_is_not_sent_with_a_token_that_has_become_anothers(
    route: Callable[..., Router], engines: Engines, accounts: Accounts
) -> None:
    moved, admin = accounts.token("w", "acme", "writer"), accounts.token("o", "beta", "admin")
    address = route(security=SecurityConfig(access_file=accounts.write())).address
    with Client(address, token=admin) as client:
        ready(client, "a", "b")
    with Client(address, token=moved) as client:
        ready(client, "a", "b")
        engines[1].stop()
        ready(client, "a")
        list(client.ingest([FERRY]))
    accounts.entries["tokens"][0]["tenant"] = "beta"
    writer, new = accounts.token("n", "acme", "writer"), accounts.token("p", "beta", "reader")
    accounts.write()
    with Client(address, token=new) as client:
        wait_for("the file", lambda: _code(client) != "UNAUTHENTICATED")
    with Client(address, token=admin) as client:
        engines[1].calls.clear()
        engines[1].start()
        wait_for("the refusal", lambda: "acme" in client.stats().engine.details["router"]["b"]["behind"])
    assert f"Bearer {moved}" not in [metadata.get("authorization") for _, metadata in engines[1].calls]
    with Client(address, token=writer) as client:
        ready(client, "a", "b")
    assert engines[1].texts() == {"ferry": b"It leaves at nine."}


def test_a_caller_that_waited_is_let_in_again_or_not(
    route: Callable[..., Router], engines: Engines, accounts: Accounts
) -> None:
    first, second = accounts.token("f", "acme", "writer"), accounts.token("s", "acme", "writer")
    address = route(security=SecurityConfig(access_file=accounts.write())).address
    held = threading.Event()
    with Client(address, token=first) as one, Client(address, token=second, retries=Retries.none()) as two:
        ready(one, "a", "b")
        ready(two, "a", "b")
        for engine in engines:
            engine.during["Ingest"] = lambda _: held.wait(20)
        stages = one.ingest([FERRY])
        next(stages)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(two.delete, "ferry")
            accounts.entries["tokens"] = accounts.entries["tokens"][:1]
            accounts.write()
            wait_for("the file", lambda: _code(two) == "UNAUTHENTICATED")
            held.set()
            list(stages)
            with pytest.raises(ServiceError) as raised:
                waiting.result()
        assert raised.value.code == "UNAUTHENTICATED"
        assert not any(engine.asked("DeleteDocument") for engine in engines)


def _code(client: Client) -> str:
    try:
        client.stats()
    except ServiceError as error:
        return error.code
    return "OK"


def test_a_tenants_calls_under_way_are_bounded(
    route: Callable[..., Router], engines: Engines, accounts: Accounts
) -> None:
    token = accounts.token("w", "acme", "writer")
    accounts.entries["tenants"]["acme"] = {"requests": 1}
    address = route(security=SecurityConfig(access_file=accounts.write())).address
    held = threading.Event()
    with Client(address, token=token, retries=Retries.none()) as client:
        ready(client, "a", "b")
        for engine in engines:
            engine.during["Answer"] = lambda _: held.wait(20)
        events = client.answer("When?")
        next(events)
        asked = sum(len(engine.calls) for engine in engines)
        with pytest.raises(ServiceError, match="quota requests: tenant 'acme'") as raised:
            client.stats()
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        assert sum(len(engine.calls) for engine in engines) == asked
        held.set()
        list(events)
        ready(client, "a", "b")


def test_a_router_that_knows_no_tenants_refuses_tokens(client: Client) -> None:
    with Client(client.address, token="blend.r.secret") as named, pytest.raises(ServiceError) as raised:
        named.stats()
    assert raised.value.code == "INVALID_ARGUMENT"
    assert "--access-file" in raised.value.message


def test_no_proxy_reads_tokens_that_go_unencrypted(
    route: Callable[..., Router], accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        token = accounts.token("w", "acme", "writer")
        address = route(security=SecurityConfig(access_file=accounts.write())).address
        with Client(address, token=token) as client:
            ready(client, "a", "b")
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_mutual_tls_to_the_engines_and_tls_to_callers(
    route: Callable[..., Router], engines: Engines, accounts: Accounts, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    (certificate, key), own = authority.sign("engine", "localhost"), authority.sign("router", "router")
    for engine in engines:
        engine.stop()
        engine.credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())], authority.path.read_bytes(), require_client_auth=True
        )
        engine.start()
    token = accounts.token("w", "acme", "writer")
    security = SecurityConfig(tls=TlsConfig(certificate, key), access_file=accounts.write())
    address = route(tls=Tls(authority.path, *own), security=security).address
    with Client(address, token=token, tls=Tls(authority.path)) as client:
        ready(client, "a", "b")
        list(client.ingest([FERRY]))
        assert client.ask("When?").text == "done"
    assert check.main([address, "--ca", str(authority.path)]) == 0
    assert check.main([address]) == 1

"""Encrypted connections: whose certificates are taken, whom a client's certificate stands for, and new files."""

from __future__ import annotations

import logging
import os
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from blend.config import SecurityConfig, TlsConfig
from blend.errors import InvalidConfig, InvalidInput
from blend_server.client import Client, Document, Retries, ServiceError, Tls, main
from blend_server.server import BlendServer
from blend_server.tls import server_credentials
from tests.server.accounts import Accounts
from tests.server.certificates import Authority

Start = Callable[..., BlendServer]


class Site:
    """An authority, a server's certificate in files of fixed names, and an access file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory, "authority")
        self.accounts = Accounts(directory / "access.yaml")
        self.certificate, self.key = directory / "server.crt", directory / "server.key"
        self.renew()

    def renew(self, days: int = 1) -> int:
        """Put a new certificate in place, the key last; returns its serial number."""
        certificate, key = self.authority.sign("server", "localhost", days=days)
        number = x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number
        os.replace(certificate, self.certificate)
        os.replace(key, self.key)
        return number

    def security(self, mutual: bool = False) -> SecurityConfig:
        tls = TlsConfig(self.certificate, self.key, self.authority.path if mutual else None)
        return SecurityConfig(tls=tls, access_file=self.accounts.write())

    def client_tls(self, *names: str, common_name: str = "client", days: int = 1) -> Tls:
        certificate, key = self.authority.sign(common_name, *names, days=days)
        return Tls(self.authority.path, certificate, key)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def outcome(address: str, tls: Tls | None, token: str | None = None) -> str:
    with Client(address, tls=tls, token=token, timeout=20, retries=Retries.none()) as client:
        try:
            client.stats()
        except ServiceError as error:
            return error.code
        return "OK"


def serial(address: str) -> int:
    host, _, port = address.rpartition(":")
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode()).serial_number


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to pass")


def test_a_client_that_trusts_the_authority_is_served_and_others_are_not(site: Site, start: Start) -> None:
    token = site.accounts.token("a", "acme", "writer")
    address = start(security=site.security()).address
    trusting = Tls(site.authority.path)
    assert outcome(address, trusting, token) == "OK"
    assert outcome(address, trusting) == "UNAUTHENTICATED"
    assert outcome(address, Tls(Authority(site.directory, "other").path), token) == "UNAVAILABLE"
    assert outcome(address, None, token) == "UNAVAILABLE"
    with Client(address, tls=trusting, token=token) as client:
        assert [p.WhichOneof("stage") for p in client.ingest([Document("d", "Some text.")])][-1] == "stored"
        assert [d.id for d in client.documents()] == ["d"]


def test_a_clients_certificate_stands_for_a_tenant_and_a_role(site: Site, start: Start) -> None:
    site.accounts.entries["certificates"] = [
        {"name": "loader.acme.example", "tenant": "acme", "role": "writer"},
        {"name": "search.acme.example", "tenant": "acme", "role": "reader"},
        {"name": "plain-name", "tenant": "umbrella", "role": "reader"},
    ]
    token = site.accounts.token("a", "umbrella", "writer")
    address = start(security=site.security(mutual=True)).address
    loader = site.client_tls("loader.acme.example")
    with Client(address, tls=loader) as client:
        list(client.ingest([Document("d", "Some text.")]))
    with Client(address, tls=site.client_tls("search.acme.example")) as client:
        assert [d.id for d in client.documents()] == ["d"]
        with pytest.raises(ServiceError, match="certificate:search.acme.example has the role reader"):
            client.delete("d")
    with Client(address, tls=site.client_tls(common_name="plain-name")) as client:
        assert list(client.documents()) == []
    with Client(address, tls=loader, token=token) as client:  # a token comes first
        assert list(client.documents()) == []


def test_a_certificate_that_is_not_listed_or_not_signed_here_lets_nobody_in(site: Site, start: Start) -> None:
    site.accounts.entries["certificates"] = [
        {"name": "loader.acme.example", "tenant": "acme", "role": "writer"},
        {"name": "search.umbrella.example", "tenant": "umbrella", "role": "reader"},
    ]
    token = site.accounts.token("a", "acme", "writer")
    address = start(security=site.security(mutual=True)).address
    assert outcome(address, site.client_tls("stranger.example")) == "UNAUTHENTICATED"
    assert outcome(address, site.client_tls("loader.acme.example", "search.umbrella.example")) == "UNAUTHENTICATED"
    # An alternative name counts, so that a common name beside it must not.
    assert outcome(address, site.client_tls("stranger.example", common_name="loader.acme.example")) == "UNAUTHENTICATED"
    other = Authority(site.directory, "other").sign("client", "loader.acme.example")
    assert outcome(address, Tls(site.authority.path, *other), token) == "UNAVAILABLE"
    expired = site.client_tls("loader.acme.example", days=-1)
    assert outcome(address, expired) == "UNAVAILABLE"
    assert outcome(address, Tls(site.authority.path), token) == "UNAVAILABLE"


def test_a_new_certificate_is_used_without_a_restart(site: Site, start: Start) -> None:
    token = site.accounts.token("a", "acme", "reader")
    address = start(security=site.security()).address
    with Client(address, tls=Tls(site.authority.path), token=token) as client:
        client.stats()
        before = serial(address)
        number = site.renew()
        wait_for(lambda: serial(address) == number)
        assert number != before
        client.stats()  # over the connection that was open


def test_files_that_do_not_fit_leave_the_old_ones_in_use(
    site: Site, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    token = site.accounts.token("a", "acme", "reader")
    address = start(security=site.security()).address
    before = serial(address)
    shutil.copy(site.authority.sign("server", "localhost")[0], site.certificate)
    with caplog.at_level(logging.INFO):
        assert [serial(address) for _ in range(3)] == [before] * 3
    assert caplog.text.count("event=reload_failed what=certificates kept=previous") == 1
    assert outcome(address, Tls(site.authority.path), token) == "OK"


def test_files_that_cannot_be_used_stop_the_server_from_starting(site: Site, tmp_path: Path) -> None:
    certificate, key, ca = site.certificate, site.key, site.authority.path
    server_credentials(TlsConfig(certificate, key, ca))
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    for config, field in (
        (TlsConfig(tmp_path / "none", key), "security.tls.certificate"),
        (TlsConfig(certificate, tmp_path / "none"), "security.tls.key"),
        (TlsConfig(certificate, site.authority.sign("other")[1]), "security.tls.certificate"),
        (TlsConfig(empty, key), "security.tls.certificate"),
        (TlsConfig(certificate, key, empty), "security.tls.client_ca"),
    ):
        with pytest.raises(InvalidConfig) as raised:
            server_credentials(config)
        assert raised.value.field == field
    key.chmod(0o644)
    with pytest.raises(InvalidConfig, match="only its owner and group may read"):
        server_credentials(TlsConfig(certificate, key))


def test_the_command_connects_encrypted(site: Site, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    site.accounts.entries["certificates"] = [{"name": "ops.example", "tenant": "acme", "role": "admin"}]
    address = start(security=site.security(mutual=True)).address
    certificate, key = site.authority.sign("ops", "ops.example")
    flags = ["--ca", str(site.authority.path), "--cert", str(certificate), "--key", str(key)]
    assert main(["stats", "--address", address, *flags]) == 0
    assert "model" in capsys.readouterr().out
    assert main(["stats", "--address", address, *flags[:4]]) == 2
    assert "both" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match=r"tls\.ca"):
        Client(address, tls=Tls(site.directory / "none"))

"""The flags of ``blend-router``, its health check, and its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blend.config import ResidencySource
from blend.errors import InvalidConfig
from blend_server import check
from blend_server.client import Client, Tls
from blend_server.router import EngineAddress, RouterConfig, flags
from blend_server.router.__main__ import main
from blend_server.router.documents import Documents
from blend_server.router.link import Link
from blend_server.router.server import Router
from tests.server.router.conftest import Engines, ready
from tests.server.router.fakes import wait_for

ONE = ["--engine", "a=127.0.0.1:50061"]


def settings(*arguments: str) -> RouterConfig:
    return flags.config(flags.parser().parse_args(arguments))


def test_defaults_are_those_of_the_settings() -> None:
    assert settings(*ONE) == RouterConfig((EngineAddress("a", "127.0.0.1:50061"),))


def test_flags_stand_for_settings(tmp_path: Path) -> None:
    config = settings(
        *ONE, "--engine", "b=engine-b:50061,tcp://b:5557,tcp://b:5558", "--lead", "2", "--journal-bytes", "1GiB",
        "--data-dir", str(tmp_path), "--engine-ca", "ca.pem", "--address", "127.0.0.1:0",
    )  # fmt: skip
    assert config.engines[1] == EngineAddress("b", "engine-b:50061", ResidencySource("tcp://b:5557", "tcp://b:5558"))
    assert (config.lead, config.journal_bytes, config.path, config.tls) == (2, 1 << 30, tmp_path, Tls("ca.pem"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "127.0.0.1:50061"], "NAME=HOST:PORT"),
        (["--engine", "a=127.0.0.1"], "engines.address"),
        (["--engine", "a b=127.0.0.1:1"], "engines.name"),
        ([*ONE, *ONE], "a different one for each engine"),
        ([*ONE, "--engine", "b=127.0.0.1:50061"], "a different one for each engine"),
        (["--engine", "a=127.0.0.1:1,nowhere"], "tcp://HOST:PORT"),
        ([*ONE, "--address", "0.0.0.0:50060"], "loopback"),
        ([*ONE, "--tls-cert", "x.pem"], "--tls-key"),
        ([*ONE, "--engine-cert", "x.pem"], "--engine-cert"),
        ([*ONE, "--lead", "-1"], "whole number"),
        (["--engine", "a=10.0.0.7:50061", "--access-file", "access.yaml"], "tokens are secrets"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((InvalidConfig, SystemExit)) as raised:
        settings(*arguments)
    assert said in str(raised.value) + capsys.readouterr().err


@pytest.mark.parametrize(("owner", "name"), [(Documents, "tend"), (Link, "watch")])
def test_the_command_ends_when_a_task_of_its_own_does(
    owner: type,
    name: str,
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("of a document")

    monkeypatch.setattr(owner, name, broken)
    handlers = [(each, signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT)]
    command = ["--address", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")]
    command += [part for engine in engines for part in ("--engine", f"{engine.name}={engine.address}")]
    try:
        assert main(command) == 1
    finally:
        for each, handler in handlers:
            signal.signal(each, handler)
    logged = capsys.readouterr().err
    assert f"event=failed task={name}" in logged
    assert "of a document" not in logged


def test_the_command_serves_and_stops(engines: Engines, tmp_path: Path) -> None:
    ready_file = tmp_path / "address"
    command = [sys.executable, "-m", "blend_server.router", "--address", "127.0.0.1:0"]
    command += ["--data-dir", str(tmp_path / "data"), "--ready-file", str(ready_file)]
    command += [part for engine in engines for part in ("--engine", f"{engine.name}={engine.address}")]
    process = subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        wait_for("its address", lambda: ready_file.exists() or process.poll() is not None)
        address = ready_file.read_text().strip()
        with Client(address) as client:
            ready(client, "a", "b")
            assert check.main([address]) == 0
            with pytest.raises(InvalidConfig, match="no other server uses"):
                Router(settings(*ONE, "--data-dir", str(tmp_path / "data"))).start()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, f"blend-router listening on {address}\n")
        assert "event=stopped" in err
        assert check.main([address]) == 1
    finally:
        process.kill()
        process.wait()

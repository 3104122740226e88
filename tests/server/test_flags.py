"""The flags of blend-server that join it to others: what they stand for, and what is said of wrong ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blend.config import MooncakeConfig, ResidencyConfig, ResidencySource, ServerConfig
from blend.errors import InvalidConfig
from blend_server import flags
from blend_server.__main__ import main


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


def settings(*arguments: str) -> ServerConfig:
    return flags.config(flags.parser().parse_args(arguments))


def test_without_flags_the_defaults_hold() -> None:
    assert settings() == ServerConfig()


def test_mooncake(secret: Path) -> None:
    joined = ["--mooncake", "10.0.0.5:50051", "--secret-file", str(secret)]
    store = settings(*joined).engine.store
    assert store.mooncake == MooncakeConfig("10.0.0.5:50051")
    assert store.secret == bytes(range(32))
    assert store.residency is None
    more = ["--mooncake-health", "10.0.0.5:9100", "--mooncake-protocol", "rdma", "--mooncake-hostname", "10.0.0.7"]
    mooncake = settings(*joined, *more, "--mooncake-segment-bytes", "2GiB").engine.store.mooncake
    assert mooncake == MooncakeConfig(
        "10.0.0.5:50051", health="10.0.0.5:9100", protocol="rdma", hostname="10.0.0.7", segment_bytes=2 << 30
    )


def test_residency() -> None:
    assert settings("--residency-node", "a").engine.store.residency == ResidencyConfig("a")
    given = ["--residency-node", "a", "--residency-publish", "tcp://10.0.0.7:5557"]
    given += ["--residency-replay", "tcp://10.0.0.7:5558", "--residency-follow", "tcp://10.0.0.8:5557"]
    given += ["--residency-follow", "tcp://10.0.0.9:5557,tcp://10.0.0.9:5558"]
    assert settings(*given).engine.store.residency == ResidencyConfig(
        "a",
        "tcp://10.0.0.7:5557",
        "tcp://10.0.0.7:5558",
        (
            ResidencySource("tcp://10.0.0.8:5557"),
            ResidencySource("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558"),
        ),
    )


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--mooncake", "nowhere"], ["mooncake.master", "'nowhere'", "host:port"]),
        (["--mooncake", "host:1", "--mooncake-health", "x"], ["mooncake.health", "host:port"]),
        (["--mooncake", "host:1", "--mooncake-protocol", "udp"], ["mooncake.protocol", "'udp'", "tcp, rdma"]),
        (["--mooncake-segment-bytes", "1GiB"], ["--mooncake: got None", "HOST:PORT", "--mooncake-segment-bytes"]),
        (["--residency-node", ""], ["residency.node", "1 to 256"]),
        (["--residency-node", "a", "--residency-publish", "x"], ["residency.publish", "tcp://HOST:PORT"]),
        (["--residency-node", "a", "--residency-follow", "x"], ["residency.sources.address", "tcp://HOST:PORT"]),
        (["--residency-node", "a", "--residency-follow", "tcp://h:1,"], ["residency.sources.replay_address"]),
        (["--residency-follow", "tcp://h:1"], ["--residency-node: got None", "--residency-follow"]),
        (["--residency-publish", "tcp://h:1"], ["--residency-node", "--residency-publish"]),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(
    arguments: list[str], messages: list[str], secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--secret-file", str(secret)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("blend-server: ")
    assert len(said.splitlines()) == 1
    for message in [*messages, "allowed: "]:
        assert message in said


def test_a_shared_store_needs_a_shared_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mooncake", "127.0.0.1:50051"]) == 2
    said = capsys.readouterr().err
    assert "--secret-file" in said
    assert "the same for all servers" in said


def test_a_secret_may_be_of_any_length_within_bounds(secret: Path) -> None:
    for length in (16, 65, 4096):
        secret.write_bytes(b"s" * length)
        assert settings("--secret-file", str(secret)).engine.store.secret == b"s" * length


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "short", "long", "of the group", "of all"])
def test_a_secret_that_cannot_be_one_is_refused(secret: Path, kind: str) -> None:
    if kind in ("short", "long"):
        secret.write_bytes(b"s" * (15 if kind == "short" else 4097))
    elif kind.startswith("of"):
        secret.chmod(0o640 if kind == "of the group" else 0o604)
    else:
        secret.unlink()
        if kind == "directory":
            secret.mkdir(mode=0o700)
        elif kind == "pipe":
            os.mkfifo(secret, 0o600)
    with pytest.raises(InvalidConfig, match="mode 0600") as raised:
        settings("--secret-file", str(secret))
    assert str(secret) in str(raised.value)
    assert "ssss" not in str(raised.value)


def test_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name in ("--mooncake HOST:PORT", "--secret-file FILE", "--residency-node NAME", "--residency-follow"):
        assert name in said

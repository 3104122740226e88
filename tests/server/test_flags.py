"""The flags of blend-server that join it to others: what they stand for, and what is said of wrong ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blend.config import (
    MooncakeConfig,
    ResidencyConfig,
    ResidencySource,
    SecurityConfig,
    ServerConfig,
    TlsConfig,
    VllmEngineConfig,
)
from blend_server.__main__ import main
from blend_server.settings import Refused, parser, read


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


def settings(*arguments: str) -> ServerConfig:
    return read(parser().parse_args(arguments), {}).config.service


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


def test_security() -> None:
    given = ["--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "ca", "--access-file", "a", "--audit-file", "-"]
    found = settings(*given, "--address", "0.0.0.0:1", "--max-open-tenants", "3", "--tenant-kv-bytes", "1GiB")
    assert found.security == SecurityConfig(TlsConfig("c", "k", "ca"), "a", False, "-", 3)
    assert found.engine.store.tenant_quota_bytes == 1 << 30
    assert settings("--address", "0.0.0.0:1", "--insecure-listen").security == SecurityConfig(insecure_listen=True)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--mooncake", "nowhere"], ["--mooncake: got 'nowhere'", "host:port"]),
        (["--mooncake", ""], ["--mooncake: got ''", "host:port"]),
        (["--mooncake", "host:0"], ["--mooncake: got 'host:0'", "1 to 65535"]),
        (["--mooncake", "host:" + "9" * 5000], ["--mooncake: got 'host:999", "1024 characters"]),
        (["--mooncake", "host:\u00b2"], ["--mooncake: got 'host:", "ASCII"]),
        (["--mooncake", "a\nb:1"], [r"--mooncake: got 'a\nb:1'", "printable"]),
        (["--mooncake", "host:1", "--mooncake-health", "x"], ["--mooncake-health: got 'x'", "host:port"]),
        (["--mooncake", "host:1", "--mooncake-health", ""], ["--mooncake-health: got ''", "host:port"]),
        (["--mooncake", "host:1", "--mooncake-health", "host:1"], ["--mooncake-health", "another address"]),
        (["--mooncake", "host:1", "--mooncake-protocol", "udp"], ["--mooncake-protocol: got 'udp'", "tcp, rdma"]),
        (["--mooncake", "host:1", "--mooncake-hostname", ""], ["--mooncake-hostname: got ''", "a host name"]),
        (["--mooncake-segment-bytes", "1GiB"], ["--mooncake: got None", "HOST:PORT", "--mooncake-segment-bytes"]),
        (["--mooncake-health", "host:1"], ["--mooncake: got None", "HOST:PORT", "--mooncake-health"]),
        (["--residency-node", ""], ["--residency-node: got ''", "1 to 256"]),
        (["--residency-node", "n" * 257], ["--residency-node: got 'nnn", "1 to 256"]),
        (["--residency-node", "a\udcff"], ["--residency-node: got 'a\\udcff'", "printable"]),
        (["--residency-node", "a", "--residency-publish", "x"], ["--residency-publish: got 'x'", "tcp://HOST:PORT"]),
        (["--residency-node", "a", "--residency-replay", "tcp://h:"], ["--residency-replay", "tcp://HOST:PORT"]),
        (["--residency-node", "a", "--residency-follow", "x"], ["--residency-follow: got 'x'", "tcp://HOST:PORT"]),
        (["--residency-node", "a", "--residency-follow", "tcp://*:1"], ["--residency-follow", "tcp://HOST:PORT"]),
        (["--residency-node", "a", "--residency-follow", "tcp://h:1,"], ["--residency-follow: got ''"]),
        (
            ["--residency-node", "a", "--residency-follow", "tcp://h:1,tcp://h:2,x"],
            ["--residency-follow: got 'tcp://h"],
        ),
        (
            ["--residency-node", "a", "--residency-publish", "tcp://h:1", "--residency-replay", "tcp://h:1"],
            ["--residency-replay: got 'tcp://h:1'", "another endpoint"],
        ),
        (
            ["--residency-node", "a", "--residency-publish", "tcp://h:1", "--residency-follow", "tcp://h:1"],
            ["--residency-follow: got 'tcp://h:1'", "another server's"],
        ),
        (["--residency-follow", "tcp://h:1"], ["--residency-node: got None", "--residency-follow"]),
        (["--residency-publish", "tcp://h:1"], ["--residency-node", "--residency-publish"]),
        (["--host-bytes", "0", "--disk-bytes", "0"], ["--host-bytes, --disk-bytes: got 0", "at least one tier"]),
        (["--address", "nowhere"], ["--address: got 'nowhere'", "host:port"]),
        (["--address", "127.0.0.1:\u00b2"], ["--address: got ", "ASCII"]),
        (["--max-queue", "0"], ["--max-queue: got 0", "at least 1"]),
        (["--chunk-tokens", "3"], ["--chunk-tokens: got 3", "at least 16"]),
        (["--threads", "4096"], ["--threads: got 4096", "at most 1024"]),
        (["--model", ""], ["--model: got ''"]),
        (["--embedding-model", ""], ["--embedding-model: got ''"]),
        (["--data-dir", ""], ["--data-dir: got ''", "a directory"]),
        (["--data-dir", "~nobody-of-that-name/data"], ["--data-dir: got '~nobody", "a directory"]),
        (
            ["--ready-file", "/nonexistent/ready"],
            ["--ready-file: got '/nonexistent/ready'", "a directory that is there"],
        ),
        (["--ready-file", ""], ["--ready-file: got ''"]),
        (
            ["--address", "0.0.0.0:1"],
            ["--address: got '0.0.0.0:1'", "a loopback", "TLS and an access file", "--insecure-listen"],
        ),
        (["--tls-cert", "c"], ["--tls-key: got None", "FILE, with --tls-cert"]),
        (["--tls-client-ca", "c"], ["--tls-cert, --tls-key: got None", "FILE, with --tls-client-ca"]),
        (["--tls-cert", "", "--tls-key", "k"], ["--tls-cert: got ''", "PEM"]),
        (["--access-file", ""], ["--access-file: got ''"]),
        (["--audit-file", ""], ["--audit-file: got ''"]),
        (["--max-open-tenants", "0"], ["--max-open-tenants: got 0", "at least 1"]),
        (["--tenant-kv-bytes", "0"], ["--tenant-kv-bytes: got 0", "at least 1"]),
        (["--tls-cert", "/none", "--tls-key", "/none"], ["--tls-cert: got '/none'", "No such file"]),
        (["--access-file", "/none"], ["--access-file: got '/none'", "No such file"]),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(
    arguments: list[str], messages: list[str], secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--secret-file", str(secret)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("blend-server: --")
    assert len(said.splitlines()) == 1
    for message in [*messages, "allowed: "]:
        assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mooncake-segment-bytes", "-1"], "--mooncake-segment-bytes: got '-1'; allowed: a size such as"),
        (["--mooncake-segment-bytes", "1 GB"], "--mooncake-segment-bytes: got '1 GB'; allowed: a size such as"),
        (["--mooncake-segment-bytes", ""], "--mooncake-segment-bytes: got ''; allowed: a size such as"),
        (["--mooncake-segment-bytes", "\u0661GiB"], "--mooncake-segment-bytes: got '\u0661GiB'; allowed: a size"),
        (["--mooncake-segment-bytes", "1e3"], "--mooncake-segment-bytes: got '1e3'; allowed: a size"),
        (["--mooncake-segment-bytes", "nan"], "--mooncake-segment-bytes: got 'nan'; allowed: a size"),
        (["--host-bytes", "9" * 400 + "TiB"], "--host-bytes: got '999"),
        (
            ["--disk-bytes", "8388608TiB"],
            f"got '8388608TiB'; allowed: a size such as 1073741824, 512MiB or 1.5GiB, at most {2**63 - 1}",
        ),
        (["--max-message-bytes", "2GiB"], f"at most {(1 << 31) - 1}"),
        (["--max-queue", "x"], "--max-queue: got 'x'; allowed: a whole number from 0 to 2147483647"),
        (["--max-queue", "2147483648"], "--max-queue: got '2147483648'; allowed: a whole number"),
        (["--top-k", "9" * 5000], "--top-k: got '999"),
        (["--drain-seconds", "-1"], "--drain-seconds: got '-1'; allowed: a whole number"),
        (["--top-k", "\u00b2"], "--top-k: got '\u00b2'; allowed: a whole number"),
        (["--log-level", "loud"], "--log-level: got 'loud'; allowed: debug, info, warning, error"),
    ],
)
def test_what_is_no_value_at_all_is_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert message in first
    assert len(others) <= arguments[0].startswith("--mooncake-"), "which needs --mooncake as well"
    for line in (first, *others):
        assert line.startswith("blend-server: --")
        assert len(line) < 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mooncake"], "--mooncake: expected one argument"),
        (["--moon\nshine"], r"unrecognized arguments: --moon\nshine"),
        (["--host-byte", "1GiB"], "unrecognized arguments: --host-byte 1GiB; --host-bytes is the nearest"),
        (["--residency", "x"], "unrecognized arguments: --residency x"),
        (["--insecure-listen=yes"], "--insecure-listen"),
    ],
)
def test_what_is_no_flag_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("blend-server: ")
    assert message in said
    assert len(said.splitlines()) == 1
    assert len(said) < 400


def test_sizes() -> None:
    for text, nbytes in (
        ("0", 0),
        ("1GiB", 1 << 30),
        ("1.5 gib", 3 << 29),
        (" 7KiB ", 7168),
        ("9007199254740993", 2**53 + 1),
    ):
        assert settings("--disk-bytes", text).engine.store.disk_bytes == nbytes
    assert settings("--max-message-bytes", "2147483647").max_message_bytes == (1 << 31) - 1


def test_a_shared_store_needs_a_shared_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mooncake", "127.0.0.1:50051"]) == 2
    said = capsys.readouterr().err
    assert "--secret-file" in said
    assert "the same for all servers" in said


def test_a_secret_may_be_of_any_length_within_bounds(secret: Path) -> None:
    for length in (16, 65, 4096):
        secret.write_bytes(b"s" * length)
        assert settings("--secret-file", str(secret)).engine.store.secret == b"s" * length


@pytest.mark.parametrize(
    "kind", ["missing", "directory", "pipe", "empty", "short", "long", "of the group", "of all", "below a file"]
)
def test_a_secret_that_cannot_be_one_is_refused(secret: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if kind in ("empty", "short", "long"):
        secret.write_bytes(b"s" * {"empty": 0, "short": 15, "long": 4097}[kind])
    elif kind == "below a file":
        secret = secret / "secret"
    elif kind.startswith("of"):
        secret.chmod(0o640 if kind == "of the group" else 0o604)
    else:
        secret.unlink()
        if kind == "directory":
            secret.mkdir(mode=0o700)
        elif kind == "pipe":
            os.mkfifo(secret, 0o600)
    assert main(["--secret-file", str(secret)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"blend-server: --secret-file: got '{secret}, ")
    assert "allowed: a file of 16 to 4096 bytes that belongs to you, mode 0600" in said
    assert len(said.splitlines()) == 1
    assert "ssss" not in said


def test_a_secret_of_another_user_is_refused(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(Refused, match=f"of user {own}.*belongs to you"):
        settings("--secret-file", str(secret))


def test_a_secret_in_the_home_directory_is_found(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(secret.parent))
    assert settings("--secret-file", f"~/{secret.name}").engine.store.secret == bytes(range(32))


def test_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name in ("--mooncake HOST:PORT", "--secret-file FILE", "--residency-node NAME", "--residency-follow"):
        assert name in said


def test_vllm() -> None:
    assert settings("--engine", "vllm").vllm == VllmEngineConfig()
    given = ["--max-model-len", "4096", "--kv-cache-bytes", "4GiB", "--vllm-args", '{"enforce_eager": true}']
    made = settings("--engine", "vllm", "--dtype", "bfloat16", *given)
    assert made.vllm == VllmEngineConfig(4096, 4 << 30, {"enforce_eager": True})
    assert made.engine.dtype == "bfloat16"


def test_how_much_is_computed_together() -> None:
    engine = settings("--shared-rows", "128", "--max-running", "8", "--max-waiting", "16").engine
    assert (engine.shared_rows, engine.max_running, engine.max_waiting) == (128, 8, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-model-len", "4096"], "--engine: got 'native'; allowed: vllm, with --max-model-len"),
        (["--vllm-args", "{}"], "--engine: got 'native'; allowed: vllm, with --vllm-args"),
        (["--engine", "vllm", "--max-model-len", "0"], "--max-model-len: got 0"),
        (["--engine", "vllm", "--kv-cache-bytes", "0"], "--kv-cache-bytes: got 0"),
        (["--engine", "vllm", "--threads", "2"], "--threads: got 2; allowed: none with vLLM"),
        (["--engine", "vllm", "--device", "cuda"], "--device: got 'cuda'; allowed: auto with vLLM"),
    ],
)
def test_flags_that_are_wrong_for_the_engine(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{", "1"])
def test_arguments_of_vllm_are_a_json_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "vllm", "--vllm-args", text]) == 2
    assert "--vllm-args" in capsys.readouterr().err

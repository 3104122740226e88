"""The image and the compose file name only what there is: flags, files, ports, modules."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from blend_server import settings
from blend_server.router import flags as router_flags
from tests.store.mooncake_server import require_mooncake

ROOT = Path(__file__).resolve().parent.parent
LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
DOCKERFILE = [line for line in LINES if line and not line.startswith("#")]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = {"blend-server": settings.parser, "blend-router": router_flags.parser}


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in DOCKERFILE if line.startswith(f"{name} ")]


def copied() -> list[str]:
    """Sources that the image takes from the repository."""
    plain = [line for line in instructions("COPY") if not line.startswith("--from")]
    return [source.rstrip("/") for line in plain for source in line.split()[:-1]]


def exposed() -> set[int]:
    return {int(port) for line in instructions("EXPOSE") for port in line.split()}


def parsed(name: str) -> Any:
    """A service's flags, as attributes."""
    program, *arguments = SERVICES[name]["command"]
    found = vars(PROGRAMS[program]().parse_args(arguments))
    return SimpleNamespace(**{flag.replace("-", "_"): value for flag, value in found.items()})


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    assert copied()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in copied():
        assert (ROOT / source).exists(), source
    assert set(copied()) == kept


def test_the_image_runs_as_a_user_and_keeps_versions() -> None:
    (user,) = instructions("USER")
    assert user.split(":")[0] not in ("root", "0")
    assert all(DOCKERFILE.index(f"USER {user}") > place for place, line in enumerate(DOCKERFILE) if line[:4] == "RUN ")
    installs = [line for line in instructions("RUN") if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    assert instructions("HEALTHCHECK")
    assert not re.search(r"secret|token|password", "\n".join(DOCKERFILE), re.IGNORECASE)
    assert "latest" not in "\n".join(instructions("FROM"))


def test_the_extras_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r'^ARG EXTRAS="(.*)"$', "\n".join(DOCKERFILE), re.MULTILINE)
    for extra in (*extras.split(","), "gpu"):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in SERVICES if SERVICES[name]["command"][0] in PROGRAMS])
def test_every_flag_of_a_service_exists(name: str) -> None:
    assert int(parsed(name).address.rpartition(":")[2]) in exposed()


@pytest.mark.parametrize("name", ["engine-a", "engine-b"])
def test_the_engines_settings_are_allowed_together(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(bytes(32))
    _, *arguments = SERVICES[name]["command"]
    here = [f"--secret-file={secret}" if flag.startswith("--secret-file=") else flag for flag in arguments]
    store = settings.read(settings.parser().parse_args(here), {}).config.service.engine.store
    assert store.mooncake is not None
    assert store.residency is not None
    assert store.residency.node == parsed(name).residency_node


def test_the_masters_flags_exist() -> None:
    require_mooncake()
    origin = importlib.util.find_spec("mooncake")
    assert origin is not None and origin.origin is not None
    said = subprocess.run(
        [Path(origin.origin).parent / "mooncake_master", "--help"], capture_output=True, text=True, check=False
    ).stdout
    program, *arguments = SERVICES["master"]["command"]
    assert program == "mooncake_master"
    for argument in arguments:
        assert f"-{argument.removeprefix('--').split('=')[0]} (" in said, argument


def test_the_router_knows_the_engines_by_their_names_and_ports() -> None:
    _, *flags = SERVICES["router"]["command"]
    config = router_flags.config(router_flags.parser().parse_args(flags))
    assert [engine.name for engine in config.engines] == ["a", "b"]
    for engine in config.engines:
        host, _, port = engine.address.rpartition(":")
        arguments = parsed(host)
        assert arguments.residency_node == engine.name
        assert arguments.mooncake_hostname in SERVICES[host]["networks"]["store"]["aliases"]
        assert arguments.mooncake_hostname not in SERVICES, "which every network of a service knows"
        assert arguments.address.rpartition(":")[2] == port
        assert engine.events is not None and engine.events.replay_address is not None
        for told, bound in (
            (engine.events.address, arguments.residency_publish),
            (engine.events.replay_address, arguments.residency_replay),
        ):
            assert told == bound.replace("*", host)
            assert int(told.rpartition(":")[2]) in exposed()


def test_engines_find_the_master_and_the_secret() -> None:
    _, *arguments = SERVICES["master"]["command"]
    given = dict(argument.removeprefix("--").split("=") for argument in arguments if "=" in argument)
    for name in ("engine-a", "engine-b"):
        engine = parsed(name)
        assert engine.mooncake == f"master:{given['rpc_port']}"
        assert engine.mooncake_health == f"master:{given['metrics_port']}"
        (secret,) = SERVICES[name]["secrets"]
        assert engine.secret_file == f"/run/secrets/{secret}"
        assert secret in COMPOSE["secrets"]


def test_services_use_what_the_file_declares() -> None:
    for name, service in SERVICES.items():
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        assert {volume.split(":")[0] for volume in service.get("volumes", [])} <= set(COMPOSE["volumes"]), name
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
    assert COMPOSE["networks"]["store"]["internal"]
    assert set(SERVICES["master"]["networks"]) == {"store"}
    assert [port for service in SERVICES.values() for port in service.get("ports", [])] == ["127.0.0.1:50060:50060"]
    args = {name for line in instructions("ARG") for name in [line.split("=")[0]]}
    assert set(COMPOSE["x-blend"]["build"]["args"]) <= args


def test_health_checks_ask_the_port_that_is_served() -> None:
    for name in ("engine-a", "engine-b", "router"):
        *command, address = SERVICES[name]["healthcheck"]["test"]
        assert command == ["CMD", "python", "-m", "blend_server.check"]
        assert address.rpartition(":")[2] == parsed(name).address.rpartition(":")[2]
    assert callable(importlib.import_module("blend_server.check").main)

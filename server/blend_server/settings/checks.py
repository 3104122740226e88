"""What settings have to be that their dataclasses cannot say: values beside each other, and what they name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from blend.config import MooncakeConfig, ResidencyConfig, ServerConfig
from blend.errors import InvalidConfig
from blend_server import access, tls
from blend_server.settings.errors import noted
from blend_server.settings.places import CommandConfig

_MODEL_FILES = ("config.json", "modules.json")


def of_values(config: CommandConfig) -> Iterator[InvalidConfig]:
    """What is wrong with values beside each other. Fields of errors are paths."""
    if not config.rag.embedding_model:
        yield InvalidConfig("rag.embedding_model", "", "a name, or a directory")
    if config.data_dir is not None and (not str(config.data_dir) or _has_no_home(config.data_dir)):
        yield InvalidConfig(
            "data_dir", str(config.data_dir), "the path of a directory; ~ stands for a user's that there is"
        )
    if (path := config.ready_file) is not None and not _can_be_replaced(path):
        yield InvalidConfig("ready_file", str(path), "a file in a directory that is there and can be written")
    store = config.engine.store
    if store.mooncake is not None:
        yield from _of_mooncake(store.mooncake, store.secret is not None)
    if store.residency is not None:
        yield from _of_residency(store.residency)


def of_files(config: CommandConfig) -> list[InvalidConfig]:
    """What is wrong with what settings name. Fields of errors are paths. No file is made or changed."""
    errors: list[InvalidConfig] = []
    if (found := config.security.tls) is not None:
        with noted(errors):
            tls.server_credentials(found)
    if (path := config.security.access_file) is not None:
        with noted(errors):
            access.read(Path(path).expanduser())
    errors += _of_directories(config)
    errors += _of_models(config)
    errors += _of_packages(config)
    return errors


def _of_mooncake(mooncake: MooncakeConfig, secret: bool) -> Iterator[InvalidConfig]:
    if not secret:
        allowed = "a file of at least 16 random bytes, the same for all servers of one Mooncake store"
        yield InvalidConfig("engine.store.secret", None, allowed)
    if mooncake.health == mooncake.master:
        yield InvalidConfig("engine.store.mooncake.health", mooncake.health, "another address than the master's own")


def _of_residency(residency: ResidencyConfig) -> Iterator[InvalidConfig]:
    own = residency.publish
    if own == residency.replay and not own.endswith(":*"):
        yield InvalidConfig("engine.store.residency.replay", own, "another endpoint than that of the events themselves")
    if own in [source.address for source in residency.sources]:
        yield InvalidConfig("engine.store.residency.sources", own, "another server's endpoint, not this one's own")


def _of_directories(config: ServerConfig) -> Iterator[InvalidConfig]:
    store = config.engine.store
    for name, path in (("data_dir", config.path), ("engine.store.directory", store.path)):
        if (name == "data_dir" or store.directory is not None) and not _is_writable(path):
            yield InvalidConfig(name, str(path), "a directory that can be made and written")
    if (file := config.security.audit_file) is not None and str(file) != "-":
        path = Path(file).expanduser()
        if not (os.access(path, os.W_OK) if path.exists() else _is_writable(path.parent, made=False)) or path.is_dir():
            yield InvalidConfig("security.audit_file", str(file), "a file that can be written, or - for standard error")


def _of_models(config: ServerConfig) -> Iterator[InvalidConfig]:
    for name, model in (("engine.model", config.engine.model), ("rag.embedding_model", config.rag.embedding_model)):
        path = os.path.expanduser(model)
        if not (os.path.exists(path) or model.startswith(("/", "./", "../", "~"))):
            continue  # a name, or a hub's id
        if not any(os.path.isfile(os.path.join(path, file)) for file in _MODEL_FILES):
            yield InvalidConfig(name, model, f"a directory with a model, and so with {_MODEL_FILES[0]}")


def _of_packages(config: ServerConfig) -> Iterator[InvalidConfig]:
    mooncake, traces = config.engine.store.mooncake, config.operations.traces
    for path, value, extra, package in (
        ("vllm", None if config.vllm is None else "vllm", "vllm", "vllm"),
        ("engine.store.mooncake.master", mooncake and mooncake.master, "mooncake", "mooncake"),
        ("operations.traces", traces, "otel", "opentelemetry.exporter.otlp.proto.grpc"),
    ):
        if value is not None and not _is_installed(package):
            yield InvalidConfig(path, value, f"none, for this needs a package: pip install 'blendkv[{extra}]'")


def _is_installed(package: str) -> bool:
    with suppress(ModuleNotFoundError):  # of what it is part of
        return importlib.util.find_spec(package) is not None
    return False


def _has_no_home(path: str | Path) -> bool:
    return os.path.expanduser(str(path)).startswith("~")


def _can_be_replaced(path: str | Path) -> bool:
    return not Path(path).is_dir() and os.access(Path(path).parent, os.W_OK | os.X_OK)


def _is_writable(path: Path, made: bool = True) -> bool:
    """Whether a directory can be written or, with ``made``, be made."""
    with suppress(OSError):
        while made and not path.exists() and path != path.parent:
            path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)

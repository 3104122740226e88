"""One configuration from a file, variables and flags: which of them is right, what reaches what, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
import yaml

from blend.config import ServerConfig, VllmEngineConfig
from blend_server.__main__ import main
from blend_server.settings import Refused, Settings, parser, read
from blend_server.settings.places import PLACES, Place
from blend_server.settings.table import FLAGS
from blend_server.settings.values import chosen

MiB = 1 << 20


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[object], str]:
    """Writes a file of settings: a text as it is, anything else as YAML; returns its path."""

    def written(content: object) -> str:
        path = tmp_path / "blend-server.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return str(path)

    return written


def settings(*arguments: str, **environ: str) -> Settings:
    return read(parser().parse_args(arguments), environ)


def refusals(*arguments: str, **environ: str) -> list[str]:
    with pytest.raises(Refused) as raised:
        settings(*arguments, **environ)
    return [str(error) for error in raised.value.errors]


def nested(path: str, value: object) -> dict[str, Any]:
    """A file's content that sets one path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            found[key] = both(one[key], other[key])
    return found


def at(config: object, path: str) -> Any:
    place = PLACES[path]
    for name in [*path.split(".")[:-1], place.name]:
        config = getattr(config, name)
    return config


# ------------------------------------------------------------------------------------------------ precedence


@pytest.mark.parametrize(
    ("path", "flag", "values"),
    [
        ("address", "address", ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")),
        ("max_queue", "max-queue", (1, 2, 3)),
        ("operations.log_level", "log-level", ("debug", "warning", "error")),
        ("engine.model", "model", ("a", "b", "c")),
        ("engine.shared_rows", "shared-rows", (16, 32, 64)),
        ("engine.store.host_bytes", "host-bytes", (1 * MiB, 2 * MiB, 3 * MiB)),
        ("rag.top_k", "top-k", (1, 2, 3)),
        ("rag.neighbours", "neighbours", (1, 2, 0)),
        ("security.max_open_tenants", "max-open-tenants", (1, 2, 3)),
        ("security.insecure_listen", "insecure-listen", (True, False, True)),
        ("engine.shadow.share", "shadow-share", (0.1, 0.2, 0.3)),
        ("vllm.max_model_len", "max-model-len", (1, 2, 3)),
    ],
)
def test_flags_beat_variables_beat_the_file_beats_the_defaults(
    path: str, flag: str, values: tuple[Any, ...], write: Callable[[object], str]
) -> None:
    of_file, of_variable, of_flag = values
    config = ["--config", write(nested(path, of_file))]
    variables = {"BLEND_SERVER_" + flag.upper().replace("-", "_"): str(of_variable)}
    arguments = [f"--{flag}"] if of_flag is True else [f"--{flag}", str(of_flag)]
    if PLACES[path].section is None and not path.startswith("vllm"):
        assert at(settings().config, path) == PLACES[path].default
    assert at(settings(*config).config, path) == of_file
    assert at(settings(*config, **variables).config, path) == of_variable
    assert at(settings(*config, *arguments, **variables).config, path) == of_flag
    assert at(settings(*config, *arguments).config, path) == of_flag


def test_a_flag_takes_back_what_a_variable_allows() -> None:
    variables = {"BLEND_SERVER_INSECURE_LISTEN": "true"}
    assert settings(**variables).config.security.insecure_listen
    assert not settings("--no-insecure-listen", **variables).config.security.insecure_listen


def test_the_file_may_be_named_by_a_variable_that_the_flag_beats(
    write: Callable[[object], str], tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("max_queue: 7")
    variable = {"BLEND_CONFIG": write("max_queue: 5")}
    assert settings(**variable).config.max_queue == 5
    assert settings("--config", str(other), **variable).config.max_queue == 7


def test_settings_of_one_section_come_from_several_sources(secret: Path, write: Callable[[object], str]) -> None:
    file = write({"engine": {"store": {"mooncake": {"segment_bytes": "1GiB", "threads": 2}, "disk_bytes": "2 GiB"}}})
    found = settings(
        "--config", file, "--secret-file", str(secret), "--disk-bytes", "0", BLEND_SERVER_MOONCAKE="10.0.0.5:50051"
    )
    store = found.config.engine.store
    assert store.mooncake is not None
    assert (store.mooncake.master, store.mooncake.segment_bytes, store.mooncake.threads) == (
        "10.0.0.5:50051",
        1 << 30,
        2,
    )
    assert (store.disk_bytes, store.secret) == (0, bytes(range(32)))


def test_a_list_replaces_a_list(write: Callable[[object], str]) -> None:
    file = write({"engine": {"store": {"residency": {"node": "a", "sources": [{"address": "tcp://h:1"}]}}}})

    def followed(*arguments: str, **environ: str) -> list[tuple[str, str | None]]:
        residency = settings("--config", file, *arguments, **environ).config.engine.store.residency
        assert residency is not None
        return [(source.address, source.replay_address) for source in residency.sources]

    assert followed() == [("tcp://h:1", None)]
    variable = {"BLEND_SERVER_RESIDENCY_FOLLOW": "tcp://h:2,tcp://h:3 tcp://h:4"}
    assert followed(**variable) == [("tcp://h:2", "tcp://h:3"), ("tcp://h:4", None)]
    assert followed("--residency-follow", "tcp://h:5", **variable) == [("tcp://h:5", None)]


def test_vllm_is_asked_for_by_its_section_or_by_the_flag(write: Callable[[object], str]) -> None:
    file = ["--config", write({"vllm": {"max_model_len": 512, "args": {"enforce_eager": True}}})]
    assert settings(*file).config.vllm == VllmEngineConfig(512, None, {"enforce_eager": True})
    assert settings(*file, "--engine", "native").config.vllm is None
    assert settings(*file, "--vllm-args", "{}").config.vllm == VllmEngineConfig(512)
    assert settings(*file, "--engine", "vllm", BLEND_SERVER_ENGINE="native").config.vllm == VllmEngineConfig()
    assert settings("--config", write("vllm: {}")).config.vllm == VllmEngineConfig()
    assert settings("--config", write("vllm:")).config.vllm is None
    assert refusals("--max-model-len", "5", BLEND_SERVER_ENGINE="native") == [
        "BLEND_SERVER_ENGINE: got 'native'; allowed: vllm, with --max-model-len"
    ]


def test_a_section_that_one_source_leaves_out_a_later_one_brings_back(
    secret: Path, write: Callable[[object], str]
) -> None:
    file = ["--config", write({"engine": {"store": {"mooncake": None, "secret_file": str(secret)}}})]
    assert settings(*file).config.engine.store.mooncake is None
    assert settings(*file, "--mooncake", "h:1").config.engine.store.mooncake is not None


# ------------------------------------------------------------------------------------------------ reach

SAMPLES: dict[str, Any] = {
    "address": "127.0.0.1:7",
    "data_dir": "data",
    "ready_file": "ready",
    "operations.metrics_address": "127.0.0.1:9",
    "operations.traces": "http://127.0.0.1:4317",
    "engine.device": "cpu",
    "engine.dtype": "float32",
    "engine.sink": [1, 2],
    "engine.store.directory": "store",
    "engine.store.write_policy": "write_back",
    "engine.store.prefetch_policy": "timeout",
    "engine.store.low_watermark": 0.5,
    "engine.store.lease_seconds": 5.5,
    "engine.store.tenant_quotas": [["acme", 5]],
    "engine.store.mooncake.master": "h:2",
    "engine.store.mooncake.health": "h:3",
    "engine.store.mooncake.protocol": "rdma",
    "engine.store.residency.publish": "tcp://127.0.0.1:5557",
    "engine.store.residency.replay": "tcp://127.0.0.1:5558",
    "engine.store.residency.sources": [{"address": "tcp://h:1", "replay_address": "tcp://h:2"}],
    "vllm.args": {"enforce_eager": True, "limits": [1, 2]},
}
NEEDED: dict[str, dict[str, Any]] = {
    "engine.store.mooncake.": nested("engine.store.mooncake.master", "h:1"),
    "engine.store.residency.": nested("engine.store.residency.node", "a"),
    "security.tls.": nested("security.tls", {"certificate": "c", "key": "k"}),
}
REACHED = [place for place in PLACES.values() if place.section is None]


def sample(place: Place, secret: Path) -> Any:
    """A value that a setting may have and that is not its default."""
    kind, default = place.kinds[0], None if place.default is MISSING else place.default
    if place.path in SAMPLES:
        return SAMPLES[place.path]
    if place.secret:
        return str(secret)
    if words := [word for word in chosen(place) if word != default]:
        return words[-1]
    if kind is bool:
        return not default
    if place.size:
        return "5MiB"
    if kind is int:
        return 40 if default is None else int(str(default)) + 1
    if kind is float:
        return float(str(default or 0.5)) * 0.99
    return "other"


@pytest.mark.parametrize("place", REACHED, ids=lambda place: place.path)
def test_every_setting_is_reached_by_the_file(place: Place, secret: Path, write: Callable[[object], str]) -> None:
    value = sample(place, secret)
    content = nested(place.path, value)
    for prefix, needed in NEEDED.items():
        if place.path.startswith(prefix):
            content = both(both(needed, nested("engine.store.secret_file", str(secret))), content)
    found = at(settings("--config", write(content)).config, place.path)
    wanted = {"5MiB": 5 * MiB, str(secret): bytes(range(32))}.get(value, value) if isinstance(value, str) else value
    if place.path.endswith("residency.sources"):
        assert [(source.address, source.replay_address) for source in found] == [("tcp://h:1", "tcp://h:2")]
    elif isinstance(value, list):
        assert found == tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)
    else:
        assert found == wanted
        assert found != place.default


def test_every_field_of_the_service_is_a_setting() -> None:
    seen: set[type] = set()
    waiting: list[type] = [ServerConfig]
    while waiting:
        kind = waiting.pop()
        seen.add(kind)
        waiting += [p.section for p in PLACES.values() if p.section is not None and p.section not in seen]
    assert {kind.__name__ for kind in seen} >= {"EngineConfig", "StoreConfig", "MooncakeConfig", "RagConfig"}
    assert len({flag.name for flag in FLAGS}) == len({flag.path for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_has_a_variable(flag: Any, secret: Path) -> None:
    """What both say alike; each needs others that are not told here, and is refused alike then."""
    place = PLACES[flag.path]
    text = "vllm" if flag.words else str(sample(place, secret)).lower() if bool in place.kinds else "5"
    option = [flag.option] if bool in place.kinds else [flag.option, text]
    try:
        wanted: object = settings(*option).config
    except Refused:
        told = [said.replace(flag.variable, flag.option) for said in refusals(**{flag.variable: text})]
        assert told == refusals(*option)
    else:
        assert settings(**{flag.variable: text}).config == wanted


def test_sizes_are_numbers_or_texts(write: Callable[[object], str]) -> None:
    for text, nbytes in (("1048576", MiB), ("1MiB", MiB), ("'1.5 MiB'", 3 * MiB // 2), ("0", 0)):
        file = write(f"engine: {{store: {{host_bytes: {text}}}}}")
        assert settings("--config", file).config.engine.store.host_bytes == nbytes


def test_sections_may_be_empty(write: Callable[[object], str]) -> None:
    for text in ("", "engine:", "engine: {store: }", "security:\n  # tls:\nrag: {}"):
        assert settings("--config", write(text)).config.service == ServerConfig()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("max_queu: 1", ["{file}: a setting: got 'max_queu'; allowed: max_queue (the nearest)"]),
        ("max-queue: 1", ["{file}: a setting: got 'max-queue'; allowed: max_queue (the nearest)"]),
        (
            "engine: {store: {host_byte: 1}}",
            ["{file}: a setting of engine.store: got 'host_byte'; allowed: host_bytes"],
        ),
        (
            "host_bytes: 1GiB",
            ["{file}: a setting: got 'host_bytes'; allowed: engine.store.host_bytes, where it belongs"],
        ),
        ("tls_cert: c", ["{file}: a setting: got 'tls_cert'; allowed: security.tls.certificate, where it belongs"]),
        ("engine: {store: {secret: 0011}}", ["a setting of engine.store: got 'secret'; allowed: secret_file"]),
        ("1: 2", ["{file}: a setting: got 1"]),
        ("max_queue: 1\nmax_queue: 2", ["{file}: got 'line 2: max_queue stands there twice'"]),
        ("rag: {top_k: 1, top_k: 2}", ["{file}: got 'line 1: top_k stands there twice'"]),
        ("rag: [", ["{file}: got ", "line 1: "]),
        ("- rag", ["{file}: got ['rag']; allowed: names of settings"]),
        ("rag: 5", ["{file}: rag: got 5; allowed: names of settings"]),
        ("max_queue: many", ["{file}: max_queue: got 'many'; allowed: an integer"]),
        ("max_queue: true", ["{file}: max_queue: got True; allowed: an integer"]),
        ("max_queue: null", ["{file}: max_queue: got None; allowed: an integer"]),
        ("rag: {neighbours: 11}", ["{file}: rag.neighbours: got 11; allowed: an integer from 0 to 10 (chunks)"]),
        ("max_queue: 0", ["{file}: max_queue: got 0; allowed: an integer of at least 1"]),
        ("rag: {top_k: 99999999999}", ["{file}: rag.top_k: got 99999999999", "2147483647"]),
        ("max_message_bytes: 4GiB", ["{file}: max_message_bytes: got '4GiB'", "2147483647"]),
        ("engine: {store: {host_bytes: 1GB}}", ["{file}: engine.store.host_bytes: got '1GB'; allowed: a size such as"]),
        ("engine: {store: {host_bytes: -1}}", ["{file}: engine.store.host_bytes: got -1"]),
        ("engine: {store: {tenant_quotas: [[a, 1], [a, 2]]}}", ["{file}: engine.store.tenant_quotas: got 'a'"]),
        ("engine: {store: {tenant_quotas: [[a, 0]]}}", ["{file}: engine.store.tenant_quotas['a']: got 0"]),
        ("engine: {store: {residency: {node: a, sources: [{address: x}]}}}", ["residency.sources: got 'x'"]),
        ("engine: {store: {residency: {node: a, sources: [{adress: x}]}}}", ["sources[0]", "address (the nearest)"]),
        (
            "engine: {store: {mooncake: {}}}",
            ["--mooncake: got None; allowed: HOST:PORT, with {file}: engine.store.mooncake"],
        ),
        (
            "engine: {store: {mooncake: {master: [h]}}}",
            ["{file}: engine.store.mooncake.master: got ['h']; allowed: a text"],
        ),
        ("engine: {kernels: cuda}", ["{file}: engine.kernels: got 'cuda'; allowed: auto"]),
        (
            "engine: {store: {secret_file: /none/secret}}",
            ["{file}: engine.store.secret_file: got '/none/secret, No such"],
        ),
        ("address: 0.0.0.0:1", ["{file}: address: got '0.0.0.0:1'", "a loopback address"]),
        ("vllm: {}\nengine: {threads: 2}", ["{file}: engine.threads: got 2; allowed: none with vLLM"]),
        ("rag: {system: !!python/object/apply:os.getcwd []}", ["{file}: got ", "line 1: could not determine"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(
    text: str, messages: list[str], write: Callable[[object], str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(text)
    assert main(["--config", file]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    for message in messages:
        assert message.replace("{file}", file) in said


@pytest.mark.parametrize("kind", ["missing", "directory", "latin", "large"])
def test_a_file_that_cannot_be_read_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "latin":
        path.write_bytes(b"address: caf\xe9")
    elif kind == "large":
        path.write_bytes(b"#" * (2 << 20))
    for arguments, environ, name in (
        (["--config", str(path)], {}, "--config"),
        ([], {"BLEND_CONFIG": str(path)}, "BLEND_CONFIG"),
    ):
        (said,) = refusals(*arguments, **environ)
        assert said.startswith(f"{name}: got '{path}")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "BLEND_SERVER_HOST_BYTE",
            "1",
            "a variable: got 'BLEND_SERVER_HOST_BYTE'; allowed: BLEND_SERVER_HOST_BYTES (the",
        ),
        ("BLEND_SERVER_CONFIG", "f", "a variable: got 'BLEND_SERVER_CONFIG'; allowed: BLEND_CONFIG, which"),
        ("BLEND_SERVER_HOST_BYTES", "1GB", "BLEND_SERVER_HOST_BYTES: got '1GB'; allowed: a size such as"),
        ("BLEND_SERVER_MAX_QUEUE", "", "BLEND_SERVER_MAX_QUEUE: got ''; allowed: a whole number"),
        ("BLEND_SERVER_MAX_QUEUE", "0", "BLEND_SERVER_MAX_QUEUE: got 0; allowed: an integer of at least 1"),
        ("BLEND_SERVER_INSECURE_LISTEN", "maybe", "BLEND_SERVER_INSECURE_LISTEN: got 'maybe'; allowed: true"),
        ("BLEND_SERVER_ENGINE", "vlm", "BLEND_SERVER_ENGINE: got 'vlm'; allowed: vllm (the nearest)"),
        ("BLEND_SERVER_SECRET_FILE", "/none", "BLEND_SERVER_SECRET_FILE: got '/none, No such file"),
        ("BLEND_SERVER_VLLM_ARGS", '{"hf_token": "abc"', "BLEND_SERVER_VLLM_ARGS: got '…'; allowed: a JSON object"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, message: str) -> None:
    said, *_ = refusals(**{variable: value})
    assert said.startswith(message)


def test_variables_of_others_are_left_alone() -> None:
    kubernetes = {
        "BLEND_SERVER_SERVICE_HOST": "10.0.0.1",
        "BLEND_SERVER_METRICS_SERVICE_HOST": "10.0.0.2",
        "BLEND_SERVER_METRICS_PORT_9464_TCP": "tcp://10.0.0.2:9464",
        "BLEND_SERVER_SERVICE_PORT_GRPC": "50061",
        "BLEND_SERVER_PORT": "tcp://10.0.0.1:50061",
        "BLEND_SERVER_PORT_50061_TCP_ADDR": "10.0.0.1",
    }
    assert settings(**kubernetes, BLEND_TOKEN="t", PATH="p").config.service == ServerConfig()


def test_all_that_is_wrong_is_told_at_once(write: Callable[[object], str]) -> None:
    file = write(
        {
            "max_queue": 0,
            "drain_seconds": -1,
            "wrong": 1,
            "engine": {"max_running": 0, "store": {"host_bytes": "1GB", "high_watermark": 2}},
            "rag": {"top_k": "x"},
        }
    )
    said = refusals("--config", file, "--chunk-tokens", "3", BLEND_SERVER_THREADS="0", BLEND_SERVER_OTHER="1")
    names = [
        f"{file}: a setting: got 'wrong'",
        f"{file}: engine.store.host_bytes: got '1GB'",
        f"{file}: rag.top_k: got 'x'",
        f"{file}: max_queue: got 0",
        f"{file}: drain_seconds: got -1",
        f"{file}: engine.max_running: got 0",
        f"{file}: engine.store.high_watermark: got 2",
        "a variable: got 'BLEND_SERVER_OTHER'",
        "BLEND_SERVER_THREADS: got 0",
        "--chunk-tokens: got 3",
    ]
    for name in names:
        assert sum(error.startswith(name) for error in said) == 1, name
    assert len(said) == len(names)


def test_what_is_refused_is_not_called_missing() -> None:
    (said,) = refusals("--mooncake", "h:1", "--secret-file", "/none")
    assert said.startswith("--secret-file: got '/none, No such file")


def test_a_section_that_lacks_something_is_not_judged_further(write: Callable[[object], str]) -> None:
    file = write({"address": "0.0.0.0:1", "security": {"access_file": "a", "tls": {"key": "k"}}})
    assert refusals("--config", file) == [f"--tls-cert: got None; allowed: FILE, with {file}: security.tls.key"]


def test_a_value_that_another_source_replaces_may_not_be_wrong_either(write: Callable[[object], str]) -> None:
    (said,) = refusals("--config", write("max_queue: x"), "--max-queue", "3")
    assert "max_queue: got 'x'" in said

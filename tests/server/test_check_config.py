"""``blend-server --check-config``: what holds and where it is from, or all that is wrong, without a model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import blend_server
from blend_server.__main__ import main
from blend_server.settings import parser, read
from tests.server.accounts import Accounts
from tests.server.certificates import Authority

EXAMPLE = Path(__file__).parents[2] / "examples" / "blend-server.yaml"


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, list[str]]]:
    """Runs the check; gives status, standard output, and the lines of standard error."""

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        status = main([*arguments, "--check-config"])
        said = capsys.readouterr()
        return status, said.out, said.err.splitlines()

    return run


Check = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Flags of a server with everything, and the values that they have here."""
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.sign("server", "localhost")
    accounts = Accounts(tmp_path / "access.yaml")
    accounts.token("ops", "acme", "admin")
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(b"not to be shown: " * 2)
    return {
        "--tls-cert": str(certificate),
        "--tls-key": str(key),
        "--tls-client-ca": str(authority.path),
        "--access-file": str(accounts.write()),
        "--audit-file": str(tmp_path / "audit.log"),
        "--secret-file": str(secret),
        "--data-dir": str(tmp_path / "not" / "there" / "yet"),
        "--address": "0.0.0.0:50061",
    }


def flags(site: dict[str, str]) -> list[str]:
    return [word for pair in site.items() for word in pair]


def test_what_holds_is_shown_with_where_it_is_from(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_queue: 9\nrag: {system: 'Answer: \"yes\"'}\nengine: {store: {mooncake: null}}\n")
    monkeypatch.setenv("BLEND_SERVER_HOST_BYTES", "8GiB")
    status, out, err = check("--config", str(file), "--model", "smollm2-135m", "--data-dir", str(tmp_path))
    assert (status, err) == (0, [])
    lines = [line.strip() for line in out.splitlines()]
    assert f"max_queue: 9  # {file}" in lines
    assert f"system: 'Answer: \"yes\"'  # {file}" in lines
    assert "host_bytes: 8GiB  # BLEND_SERVER_HOST_BYTES" in lines
    assert "model: smollm2-135m  # --model" in lines
    assert f"mooncake: null  # {file}" in lines
    assert "disk_bytes: 16GiB" in lines
    assert "vllm: null" in lines
    assert yaml.safe_load(out)["engine"]["store"]["fsync"] is True


def test_what_is_shown_can_be_read_again(check: Check, site: dict[str, str], tmp_path: Path) -> None:
    more = ["--residency-node", "a", "--residency-follow", "tcp://h:1,tcp://h:2", "--max-running", "3"]
    arguments = [*flags(site), *more, "--engine", "vllm", "--vllm-args", '{"enforce_eager": true, "seed": 5}']
    wanted = read(parser().parse_args(arguments), {})
    status, out, err = check(*arguments)
    if err:  # vLLM may be missing here
        status, out, err = check(*(arguments := [*flags(site), *more]))
        wanted = read(parser().parse_args(arguments), {})
    assert (status, err) == (0, [])
    file = tmp_path / "shown.yaml"
    file.write_text(out)
    assert read(parser().parse_args(["--config", str(file)]), {}).config == wanted.config


def test_secrets_are_hidden(check: Check, site: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("vllm: {args: {hf_token: hf_abc, max_num_batched_tokens: 4096, load: [{api_key: sk-abc}]}}")
    found = read(parser().parse_args([*flags(site), "--config", str(file)]), {})
    out = blend_server.settings.shown(found)
    assert f"secret_file: {site['--secret-file']}  # --secret-file" in out
    assert "not to be shown" not in out
    assert "abc" not in out
    assert "max_num_batched_tokens: 4096" in out


def test_nothing_is_made_and_nothing_kept(check: Check, site: dict[str, str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    status, _, err = check(*flags(site))
    assert (status, err) == (0, [])
    assert sorted(tmp_path.rglob("*")) == before


def test_all_that_is_wrong_with_files_is_told_at_once(check: Check, site: dict[str, str], tmp_path: Path) -> None:
    Path(site["--access-file"]).write_text("tokens: [{id: a}]")
    os.chmod(site["--tls-key"], 0o604)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    store = tmp_path / "settings.yaml"
    store.write_text(f"engine: {{store: {{directory: {tmp_path}/file/store}}}}")
    wrong = {
        **site,
        "--data-dir": str(tmp_path / "file"),
        "--audit-file": str(tmp_path / "none" / "audit"),
        "--model": str(tmp_path / "empty"),
        "--embedding-model": "./nowhere",
    }
    status, out, err = check(*flags(wrong), "--config", str(store))
    assert (status, out) == (2, "")
    names = [line.removeprefix("blend-server: ").partition(": got")[0] for line in err]
    assert sorted(names) == sorted(
        [
            "--access-file: access.tokens[0]",
            "--audit-file",
            "--data-dir",
            "--embedding-model",
            "--model",
            "--tls-key",
            f"{store}: engine.store.directory",
        ]
    )


def test_wrong_values_are_told_before_files_are_looked_at(check: Check, site: dict[str, str]) -> None:
    status, out, err = check(*flags({**site, "--tls-cert": "/none"}), "--max-queue", "0", "--top-k", "0")
    assert (status, out) == (2, "")
    assert [line.split(":")[1].strip() for line in err] == ["--top-k", "--max-queue"]


def test_a_model_directory_is_fine(check: Check, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert check("--model", str(tmp_path), "--embedding-model", str(tmp_path), "--data-dir", str(tmp_path))[0] == 0


def test_the_example_is_fine_and_needs_no_torch(tmp_path: Path) -> None:
    """In a process of its own, which says what it has imported."""
    code = (
        "import sys; from blend_server.__main__ import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    root = Path(blend_server.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code, "--config", str(EXAMPLE), "--check-config"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "[]\n")
    assert f"host_bytes: 2GiB  # {EXAMPLE}" in run.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_what_the_example_leaves_out_is_right_too(tmp_path: Path, engine: str) -> None:
    """Its commented settings name what there is; those of one engine are not the other's."""
    others = {"native": ("vllm", "max_model_len", "kv_cache_bytes", "args"), "vllm": ("max_kl",)}[engine]
    lines = EXAMPLE.read_text().splitlines()
    # What is commented out begins with a key, or goes on with a list, behind "# ".
    opened = []
    for line in lines:
        text = line.lstrip()
        body = text.removeprefix("# ")
        key = body.strip().split(":")[0]
        setting = text.startswith("# ") and (body.lstrip().startswith("- {") or key.isidentifier())
        setting = setting and key not in others
        opened.append(line.replace("# ", "", 1) if setting else line)
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    file = tmp_path / "settings.yaml"
    file.write_text("\n".join(opened).replace("./secret", str(tmp_path / "secret")))
    config = read(parser().parse_args(["--config", str(file)]), {}).config
    assert config.security.tls is not None
    assert (config.vllm is None) == (engine == "native")
    assert (config.engine.shadow.max_kl is None) == (engine == "vllm")
    assert config.engine.store.mooncake is not None
    assert config.engine.store.residency is not None
    assert config.engine.store.residency.sources[0].replay_address == "tcp://10.0.0.8:5558"

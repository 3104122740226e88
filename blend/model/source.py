"""Where a model comes from: its name, a directory or a hub id in; a loaded model and its tokenizer out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionResolutionError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from blend.config import cache_dir
from blend.errors import (
    InvalidConfig,
    ModelCorrupt,
    ModelNotFound,
    ModelUnavailable,
    ModelUnsupported,
    ResourceExhausted,
)
from blend.model import embedded
from blend.model.embedded import Progress, quiet_loading
from blend.model.tokenizer import Tokenizer
from blend.model.wide import computes_in, widen

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_HUB_LEFT_OUT = ("*/*", "consolidated*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A decoder ready to run, with its tokenizer and the directory that its files lie in."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    directory: Path
    name: str


def resolve(name: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Return a directory in transformers format that holds the model ``name``, fetched where needed.

    Args:
        name: ``smollm2-135m``, a directory, or a hub id ``owner/name``. A directory that exists comes before the
            hub. Files fetched from the hub are kept in the hub library's own cache.
        cache: root of the cache for the default model; default :func:`blend.config.cache_dir`.
        progress: called with a line for each step that takes seconds.

    Raises:
        ModelNotFound: no such name, directory or repository, or it holds no model.
        ModelUnavailable: it cannot be fetched now.
        ModelCorrupt: files are missing, cut short, or fail their digest.
        ModelUnsupported: its weights are there as pickles only.
    """
    if name == embedded.NAME:
        return embedded.provide(cache_dir() if cache is None else cache, progress)
    # Not Path's own methods: they raise for names that no file can have.
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        path = _from_hub(name, progress)
    elif not path.is_dir():
        raise ModelNotFound(name, "it is a file; a model is a directory in transformers format")
    _check_files(name, path)
    return path


def load(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model ``name`` for inference: evaluation mode, no gradients, weights in ``dtype`` on ``device``.

    Args:
        name: as in :func:`resolve`.
        dtype: as in :func:`pick_dtype`.
        device: as in :func:`pick_device`.
        cache: as in :func:`resolve`.
        progress: as in :func:`resolve`.

    Raises:
        ModelError: one of the kinds that :func:`resolve` raises; ``ModelCorrupt`` also for weights that do not fit
            the configuration, ``ModelUnsupported`` also for an architecture that transformers does not have.
        InvalidConfig: ``dtype`` or ``device`` is unknown, or the device is not there.
        ResourceExhausted: the device has not enough memory.
    """
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    directory = resolve(name, cache, progress)
    with quiet_loading():
        tokenizer = Tokenizer.from_directory(directory, name)
        model = _read_weights(name, directory, kind)
    module: torch.nn.Module = model
    module.requires_grad_(False).train(False)
    try:
        module.to(where)
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(f"model {name!r} does not fit into the memory of {where}") from error
    widen(module, kind, where)
    return LoadedModel(model, tokenizer, directory, name)


def pick_device(name: str) -> torch.device:
    """The device called ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.

    Raises:
        InvalidConfig: another name, or ``cuda`` where there is none.
    """
    there = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if there else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not there):
        raise InvalidConfig("device", name, "auto, cpu" + (" or cuda" if there else " (no CUDA device is there)"))
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type called ``name``; ``auto`` is bfloat16 where the device computes in it, else float32.

    A CPU without such instructions gains nothing from bfloat16 but room.

    Raises:
        InvalidConfig: another name.
    """
    if name == "auto":
        return torch.bfloat16 if computes_in(torch.bfloat16, device) else torch.float32
    if name not in _DTYPES:
        raise InvalidConfig("dtype", name, f"auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _read_weights(name: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    # What comes back depends on output_loading_info, which the annotation of from_pretrained does not say.
    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, ImportError) as error:
        raise ModelUnsupported(name, f"transformers cannot load it: {_first_line(error)}") from error
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelCorrupt(name, f"the weights in {directory} cannot be read: {_first_line(error)}") from error
    except (KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ModelCorrupt(name, f"the configuration in {directory} cannot be used: {reason}") from error
    if extra := sorted(info["unexpected_keys"]):
        reason = f"the weights in {directory} hold {len(extra)} tensors that its configuration has no place for"
        raise ModelCorrupt(name, f"{reason}: {_some(extra)}")
    if missing := sorted(info["missing_keys"]):
        raise ModelCorrupt(name, f"the weights in {directory} lack {len(missing)} tensors: {_some(missing)}")
    if not isinstance(model, PreTrainedModel):
        raise ModelUnsupported(name, f"transformers loads it as {type(model).__name__}")
    return model


def _from_hub(name: str, progress: Progress | None) -> Path:
    """Download the files of a hub repository that are needed to run it, pickles and code left out."""
    if not _HUB_ID.fullmatch(name) or name.startswith(("./", "../", "~")):
        known = f"{embedded.NAME}, an existing directory, or a hub id owner/name"
        raise ModelNotFound(name, f"no such name or directory; allowed: {known}")
    if progress is not None:
        progress(f"fetching {name} from the hub")
    try:
        with quiet_loading():
            found = snapshot_download(name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_LEFT_OUT))
    except GatedRepoError as error:
        raise ModelUnavailable(name, "its hub repository is gated: ask for access and log in") from error
    except (RepositoryNotFoundError, DisabledRepoError, HFValidationError) as error:
        raise ModelNotFound(name, f"no such directory, and no such hub repository: {_first_line(error)}") from error
    except (OSError, LocalEntryNotFoundError, RevisionResolutionError) as error:
        reason = f"no such directory, and the hub cannot be reached: {_first_line(error)}"
        raise ModelUnavailable(name, reason) from error
    return Path(found)


def _check_files(name: str, directory: Path) -> None:
    """Refuse a directory that is no model, is incomplete, or has its weights as pickles only."""
    if not (directory / "config.json").is_file():
        raise ModelNotFound(name, f"{directory} is not a model in transformers format: it has no config.json")
    _json_object(name, directory / "config.json")
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        weights = [single]
    elif index.is_file():
        weights = _shards(name, index)
    elif pickles := sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern)):
        reason = "reading a pickle can run code; convert them to safetensors"
        raise ModelUnsupported(name, f"its weights are pickles ({_some(pickles)}): {reason}")
    else:
        raise ModelNotFound(name, f"{directory} has no model.safetensors (nor its index)")
    for file in weights:
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelCorrupt(name, f"{file} is not a whole safetensors file: {_first_line(error)}") from error


def _shards(name: str, index: Path) -> list[Path]:
    mapping = _json_object(name, index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(f, str) and Path(f).name == f for f in mapping.values()):
        raise ModelCorrupt(name, f"{index} does not map tensors to files beside it")
    files = sorted(set(mapping.values()))
    if missing := [file for file in files if not (index.parent / file).is_file()]:
        raise ModelCorrupt(name, f"{index.parent} lacks weights named by its index: {_some(missing)}")
    return [index.parent / file for file in files]


def _json_object(name: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelCorrupt(name, f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(name, f"{path} is not a JSON object")
    return value


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__

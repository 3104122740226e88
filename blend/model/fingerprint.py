"""The digest that separates the KV of one model set-up from that of every other."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blend.config import cache_dir
from blend.errors import ModelCorrupt, ModelNotFound

_LOG = logging.getLogger(__name__)
_READ = 1 << 22
_WORTH_REMEMBERING = 1 << 24
_DIGEST_BYTES = 32
_IRRELEVANT = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id"})


def fingerprint(
    directory: Path,
    config: Mapping[str, Any],
    *,
    tokenizer: str,
    dtype: str,
    sink: Sequence[int],
    layout_version: int,
    context: int,
    rope: Mapping[str, Any],
    adapter: str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    cache: Path | None = None,
) -> str:
    """Hex digest (blake2b, 32 bytes) of all that a stored chunk's KV depends on besides its tokens.

    Args:
        directory: the model's directory; the bytes of its safetensors files count, their names do not.
        config: the model's configuration, ``config.to_dict()`` or config.json. Private fields, the weights'
            storage type, labels and versions are left out: they have no effect on KV.
        tokenizer: :attr:`blend.model.tokenizer.Tokenizer.digest`.
        dtype: the type that KV is computed and stored in.
        sink: token ids that every chunk is encoded behind.
        layout_version: version of the stored object's layout.
        context: how many neighbours a chunk is encoded behind at a time.
        rope: rotary parameters as they are in force.
        adapter: digest or name of an adapter on top of the weights.
        tp_rank, tp_size: which tensor-parallel shard this is.
        cache: root of the digest cache; default :func:`blend.config.cache_dir`.

    Raises:
        ModelNotFound: no safetensors files in ``directory``.
        ModelCorrupt: one of them cannot be read.
    """
    fields = {
        "weights": weights_digest(directory, cache),
        "config": _relevant(config),
        "tokenizer": tokenizer,
        "dtype": dtype,
        "sink": [int(t) for t in sink],
        "layout_version": layout_version,
        "context": context,
        "rope": rope,
        "adapter": adapter,
        "tensor_parallel": [tp_rank, tp_size],
    }
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(canonical.encode("utf-8"), digest_size=_DIGEST_BYTES).hexdigest()


def weights_digest(directory: Path, cache: Path | None = None) -> str:
    """Hex digest of the safetensors files of a model directory, in the order of their names.

    Raises:
        ModelNotFound: there are none.
        ModelCorrupt: one cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(str(directory), "it holds no safetensors weights")
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        try:
            total.update(bytes.fromhex(file_digest(file, cache)))
        except OSError as error:
            raise ModelCorrupt(str(directory), f"{file.name} cannot be read: {error}") from error
    return total.hexdigest()


def file_digest(path: Path, cache: Path | None = None) -> str:
    """Hex digest (blake2b, 32 bytes) of a file's bytes, of a large file (16 MiB) remembered until it changes.

    What is remembered lies under ``cache / "digests"``, one small file each, and may be deleted at any time. It
    is found by the file's resolved path, device, inode, size and times of modification and of status change.

    Raises:
        OSError: the file cannot be read.
    """
    path = path.resolve()
    stat = path.stat()
    if stat.st_size < _WORTH_REMEMBERING:
        return read_digest(path)
    digest = _remembered(_memo_path(path, stat, cache))
    if digest is None:
        digest, stat = _hash(path)
        _remember(_memo_path(path, stat, cache), digest)
    return digest


def read_digest(path: Path) -> str:
    """Hex digest (blake2b, 32 bytes) of a file's bytes, read now and not remembered.

    Raises:
        OSError: the file cannot be read.
    """
    return _hash(path)[0]


def _hash(path: Path) -> tuple[str, os.stat_result]:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as stream:
        # The state before reading: if the file changes meanwhile, the next look-up does not find this digest.
        stat = os.fstat(stream.fileno())
        while block := stream.read(_READ):
            digest.update(block)
    return digest.hexdigest(), stat


def _memo_path(path: Path, stat: os.stat_result, cache: Path | None) -> Path:
    state = (str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    name = hashlib.blake2b(repr(state).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return (cache_dir() if cache is None else cache) / "digests" / name


def _remembered(memo: Path) -> str | None:
    try:
        digest = memo.read_text(encoding="ascii")
        return digest if len(bytes.fromhex(digest)) == _DIGEST_BYTES else None
    except (OSError, ValueError):
        return None


def _remember(memo: Path, digest: str) -> None:
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=memo.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                stream.write(digest)
            Path(temporary).replace(memo)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        _LOG.debug("digest not remembered: %s", error)


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without fields of no effect, in it or in the configurations inside it."""
    return {
        key: _relevant(value) if isinstance(value, Mapping) else value
        for key, value in ((str(k), v) for k, v in config.items())
        if key not in _IRRELEVANT and not key.startswith("_")
    }


def _plain(value: object) -> object:
    """Sets and arrays as lists. Anything else is refused: its text might differ from process to process."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a fingerprint is made of plain values, not {type(value).__name__}")

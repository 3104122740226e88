"""The index's file: vectors as plain numbers behind a checked header. Nothing in it is executed or unpickled.

::

    8 bytes   magic and format version
    4 bytes   length of the header
    header    JSON: generation, stamp, pipeline, rows, dim
    rows      8 bytes each, rising
    vectors   rows × dim × 4 bytes, float32
    32 bytes  blake2b of all before

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blend.errors import TierUnavailable
from blend.rag.records import Embeddings, Head

_MAGIC = b"blndidx\x01"
_DIGEST = 32


class Unusable(Exception):
    """A snapshot cannot be used; the message says why."""


def write(path: Path, pipeline: str, head: Head, contents: Embeddings) -> None:
    """Put a snapshot in place of the one at ``path``, atomically.

    Raises:
        TierUnavailable: it cannot be written; the one before is untouched.
    """
    rows, vectors = contents
    fields = {**head._asdict(), "pipeline": pipeline, "rows": len(rows), "dim": vectors.shape[1]}
    header = json.dumps(fields).encode("utf-8")
    parts = (_MAGIC, len(header).to_bytes(4, "little"), header, _raw(rows, "<i8"), _raw(vectors, "<f4"))
    digest = hashlib.blake2b(digest_size=_DIGEST)
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise TierUnavailable(f"the index {path} cannot be written: {error}") from error


def read(path: Path, pipeline: str) -> tuple[Head, Embeddings] | None:
    """The snapshot at ``path``, or ``None`` where there is none.

    Raises:
        Unusable: it cannot be read, is damaged, or is of another pipeline.
    """
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"it cannot be read: {error}") from error
    body = data[:-_DIGEST]
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise Unusable("it is no index of this version")
    if len(data) < _DIGEST or hashlib.blake2b(body, digest_size=_DIGEST).digest() != bytes(data[-_DIGEST:]):
        raise Unusable("its checksum does not match")
    start = len(_MAGIC) + 4
    payload = start + int.from_bytes(body[len(_MAGIC) : start], "little")
    try:
        return _parse(json.loads(bytes(body[start:payload])), body[payload:], pipeline)
    except (ValueError, KeyError, TypeError) as error:
        raise Unusable(f"its contents do not make sense: {error}") from error


def _raw(array: NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


def _parse(fields: dict[str, Any], payload: memoryview, pipeline: str) -> tuple[Head, Embeddings]:
    if fields["pipeline"] != pipeline:
        raise Unusable("it was made with other settings, another tokenizer or another embedding model")
    count, dim = int(fields["rows"]), int(fields["dim"])
    rows = np.frombuffer(payload[: 8 * count], dtype="<i8").astype(np.int64)
    vectors = np.frombuffer(payload[8 * count :], dtype="<f4").astype(np.float32).reshape(count, dim)
    if not (np.diff(rows) > 0).all() or not np.isfinite(vectors).all():
        raise Unusable("its rows are out of order, or its vectors are no numbers")
    return Head(int(fields["generation"]), str(fields["stamp"])), Embeddings(rows, vectors)

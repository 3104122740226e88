"""Small objects and faults for the store's tests."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blend.store import FileIO, Header, Namespace, ObjectKey, Tier, conditioned_variant, content_key

NAMESPACE = Namespace("acme", "0f" * 16, b"a secret of this test suite")
GENERATION = b"writer of tests!"


def make(
    seed: int,
    *,
    neighbours: Sequence[str] = (),
    tokens: int = 5,
    layers: int = 3,
    head_dim: int = 4,
    namespace: Namespace = NAMESPACE,
    sensitive: bool = False,
) -> tuple[Header, bytes]:
    """Return an object of its own for every seed: its header, sealed, and its payload; with a sensitivity or not."""
    rng = random.Random(seed)
    token_ids = (seed, *(rng.randrange(50_000) for _ in range(tokens - 1)))
    content = content_key(namespace, token_ids)
    header = Header(
        key=ObjectKey(content, conditioned_variant(neighbours) if neighbours else "plain"),
        namespace=namespace.digest,
        token_ids=token_ids,
        layers=layers,
        kv_heads=2,
        head_dim=head_dim,
        dtype="bfloat16",
        generation=GENERATION,
        position=1,
        neighbours=tuple(neighbours),
    )
    payload = rng.randbytes(header.payload_nbytes)
    if sensitive:
        sensitivity = b"".join(struct.pack("<e", rng.random()) for _ in range(layers * tokens))
        header = replace(header, sensitivity=sensitivity)
    return header.sealed(payload), payload


OBJECT_NBYTES = make(0)[0].object_nbytes
"""Bytes of any object that :func:`make` returns by default."""


def read(tier: Tier, key: ObjectKey) -> bytes | None:
    """Return an object's payload, or ``None`` when it is not there."""
    lease = tier.get(key)
    if lease is None:
        return None
    with lease:
        return bytes(lease.payload())


def path_of(directory: Path, header: Header) -> Path:
    """Return the file of an object in a disk tier's directory."""
    return directory / "objects" / header.key.content[:2] / str(header.key)


class FaultyIO(FileIO):
    """System calls of which some fail: ``faults`` maps a call's name to an errno, once ``after`` more succeeded."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.after = 0

    def _maybe(self, call: str) -> None:
        code = self.faults.get(call)
        if code is None:
            return
        if self.after > 0:
            self.after -= 1
            return
        raise OSError(code, os.strerror(code))

    def open(self, path: str, flags: int) -> int:
        self._maybe("create" if flags & os.O_CREAT else "open")
        return super().open(path, flags)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._maybe("pread")
        return super().pread(fd, into, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if "pwrite" in self.faults and len(data) > 1:  # a full disk takes a part first
            super().pwrite(fd, data[: len(data) // 2], offset)
        self._maybe("pwrite")
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._maybe("fsync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self._maybe("rename")
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._maybe("unlink")
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._maybe("mkdir")
        super().mkdir(path)

    def find(self, path: str) -> os.stat_result:
        self._maybe("find")
        return super().find(path)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._maybe("truncate")
        super().truncate(fd, nbytes)

    def wait_lock(self, fd: int) -> None:
        self._maybe("wait_lock")
        super().wait_lock(fd)

    def read_record(self, fd: int, nbytes: int, offset: int = 0) -> bytes:
        self._maybe("read_record")
        return super().read_record(fd, nbytes, offset)

    def write_record(self, fd: int, data: bytes, offset: int = 0) -> None:
        self._maybe("write_record")
        super().write_record(fd, data, offset)


NO_SPACE, BROKEN, FORBIDDEN, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS

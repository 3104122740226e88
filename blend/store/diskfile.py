"""Files of the disk tier: one object each, and the one open descriptor that all its leases share."""

from __future__ import annotations

import weakref

from blend.errors import ObjectCorrupt
from blend.store.buffers import allocate
from blend.store.fileio import FileIO, close, read_into
from blend.store.key import ObjectKey
from blend.store.layout import ALIGNMENT, Header, check_identity, decode, peek


class OpenFile:
    """An object's descriptor, shared by its leases and closed with the last of them. It is what pins the object."""

    __slots__ = ("__weakref__", "_io", "fd", "header", "held")

    def __init__(self, io: FileIO, fd: int, held: StoredFile, header: Header) -> None:
        self._io = io
        self.fd = fd
        self.held = held
        self.header = header

    def __del__(self) -> None:
        close(self._io, self.fd)


class StoredFile:
    """An object's file. ``aside`` is its path once it has been quarantined; ``opening`` counts threads at it."""

    __slots__ = ("_file", "aside", "key", "nbytes", "opening")

    def __init__(self, key: ObjectKey, nbytes: int, aside: str | None = None) -> None:
        self.key = key
        self.nbytes = nbytes
        self.aside = aside
        self.opening = 0
        self._file: weakref.ref[OpenFile] | None = None

    @property
    def pinned(self) -> bool:
        """Whether a lease can still read it, or is about to."""
        return self.opening > 0 or self.file() is not None

    def file(self) -> OpenFile | None:
        """Return the descriptor that leases hold now."""
        return self._file() if self._file is not None else None

    def share(self, file: OpenFile) -> OpenFile:
        """Return the descriptor to use: ``file``, unless another thread was faster."""
        shared = self.file()
        if shared is None:
            shared = file
            self._file = weakref.ref(file)
        return shared


def read_header(io: FileIO, fd: int, key: ObjectKey, nbytes: int) -> Header:
    """Return the verified header of the object ``key``, ``nbytes`` long.

    Raises:
        ObjectCorrupt: the file is not that object, or not whole; the message begins with the field's name.
        OSError: it cannot be read.
    """
    size = io.stat(fd).st_size
    if size != nbytes:
        raise ObjectCorrupt(f"size: {size} bytes, {nbytes} expected")
    head = allocate(min(size, ALIGNMENT)).data
    head = head[: read_into(io, fd, head, 0)]
    length = peek(head)
    if len(head) < length <= size:
        head = allocate(length).data
        head = head[: read_into(io, fd, head, 0)]
    header = decode(head)
    check_identity(header, key, nbytes)
    return header


def read_range(io: FileIO, fd: int, offset: int, into: memoryview) -> memoryview:
    """Fill ``into`` from ``offset`` on and return it read-only. Nothing is verified.

    Raises:
        ObjectCorrupt: the file ends before.
        OSError: it cannot be read.
    """
    got = read_into(io, fd, into, offset)
    if got != len(into):
        raise ObjectCorrupt(f"size: the file ends after {offset + got} bytes")
    return into.toreadonly()

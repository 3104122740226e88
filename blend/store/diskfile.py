"""Files of the disk tier: one object each, and the one open descriptor that all its leases share."""

from __future__ import annotations

import weakref

from blend.errors import ObjectCorrupt
from blend.store.buffers import allocate
from blend.store.fileio import FileIO, close, read_into
from blend.store.key import ObjectKey
from blend.store.layout import ALIGNMENT, Header, check_identity, decode, peek
from blend.store.lease import Readers


class _Descriptor:
    """Closes a descriptor when nothing refers to it any more.

    It is an object of its own since a weak reference still finds an object while its ``__del__`` runs: a reader could
    be given a file that is being closed. Nothing refers weakly to this one.
    """

    __slots__ = ("_io", "fd")

    def __init__(self, io: FileIO, fd: int) -> None:
        self._io = io
        self.fd = fd

    def __del__(self) -> None:
        close(self._io, self.fd)


class OpenFile:
    """An object's descriptor, shared by its leases and closed with the last of them. It is what pins the object."""

    __slots__ = ("__weakref__", "_descriptor", "_io", "header", "held")

    def __init__(self, io: FileIO, fd: int, held: StoredFile, header: Header) -> None:
        self._io = io
        self._descriptor = _Descriptor(io, fd)
        self.held = held
        self.header = header

    @property
    def fd(self) -> int:
        """The descriptor; good for as long as this object is referred to."""
        return self._descriptor.fd

    @property
    def unlinked(self) -> bool:
        """Whether the object has been removed, by whichever process."""
        return not self._io.stat(self.fd).st_nlink


class StoredFile:
    """An object's file. ``aside`` is its path once it has been quarantined; ``opening`` counts threads at it."""

    __slots__ = ("_file", "aside", "key", "nbytes", "opening", "readers")

    def __init__(self, key: ObjectKey, nbytes: int, aside: str | None = None) -> None:
        self.key = key
        self.nbytes = nbytes
        self.aside = aside
        self.opening = 0
        self.readers = Readers()
        self._file: weakref.ref[OpenFile] | None = None

    @property
    def pinned(self) -> bool:
        """Whether a lease can still read it, or is about to."""
        self.readers.lapse()
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


def read_range(io: FileIO, fd: int, offset: int, into: memoryview) -> None:
    """Fill ``into`` from ``offset`` on. Nothing is verified.

    Raises:
        ObjectCorrupt: the file ends before.
        OSError: it cannot be read.
    """
    got = read_into(io, fd, into, offset)
    if got != len(into):
        raise ObjectCorrupt(f"size: the file ends after {offset + got} bytes")

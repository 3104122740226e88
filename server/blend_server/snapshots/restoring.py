"""A snapshot into a new data directory. Nothing in it is trusted: it may have been damaged, or made by somebody else.

Members are read one by one; only names that a snapshot has are taken, only plain files, each once. Where they go is
decided here, with modes of our own, so that no link, device or path in it means anything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blend.errors import InvalidInput, NotFound, ObjectCorrupt, TierUnavailable
from blend.rag.backup import check_catalog
from blend.store.fileio import CREATE, FileIO, describe, sync_directory
from blend.store.secret import SECRET_NBYTES
from blend_server.snapshots.manifest import MANIFEST, MANIFEST_NBYTES, SECRET, File, Manifest, is_catalog, is_object

_BLOCK = 1 << 20


def inspect(archive: Path) -> Manifest:
    """Return what a snapshot says that it holds; its files are not read.

    Raises:
        NotFound: there is no such file.
        TierUnavailable: it cannot be read.
        ObjectCorrupt: it is no snapshot, was cut short, or has another format.
    """
    with _opened(archive) as tar:
        for member in _members(tar):
            if member.name == MANIFEST:
                return _manifest(tar, member)
    raise _cut_short(archive)


def restore(archive: Path, directory: Path, *, kv: bool = True) -> Manifest:
    """Make the data directory ``directory`` from a snapshot: all of it, or nothing.

    Args:
        directory: must be missing or empty.
        kv: whether stored KV comes along, if it is in the snapshot.

    Raises:
        InvalidInput: ``directory`` holds something already.
        NotFound: there is no such file.
        TierUnavailable: a file cannot be read or written.
        ObjectCorrupt: the snapshot is damaged or none, or was written by another version.
    """
    directory = directory.expanduser().resolve()
    _require_free(directory)
    if kv:
        inspect(archive).check_layout()  # which is told before much is written
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            with _opened(archive) as tar:
                manifest = _Restoring(work, kv).run(tar, archive)
            _require_free(directory)
            os.rename(work, directory)
            sync_directory(FileIO(), str(directory.parent))
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    except OSError as error:
        raise TierUnavailable(f"{directory} cannot be written: {describe(error)}") from error
    return manifest


def _require_free(directory: Path) -> None:
    """Raise :class:`InvalidInput` unless ``directory`` is missing or empty; a server's has its lock in it at least."""
    if os.path.lexists(directory) and not (directory.is_dir() and not any(directory.iterdir())):
        raise InvalidInput("DIR", str(directory), "a directory that is missing or empty, and that no server uses")


class _Restoring:
    """One snapshot on its way into an empty directory."""

    def __init__(self, root: Path, kv: bool) -> None:
        self._root = root
        self._kv = kv
        self._files: dict[str, File] = {}
        self._objects = self._nbytes = 0

    def run(self, tar: tarfile.TarFile, archive: Path) -> Manifest:
        """Write the files, and check them against the manifest, which comes last."""
        for member in _members(tar):
            name = member.name
            if name == MANIFEST:
                manifest = _manifest(tar, member)
                self._check(manifest, archive)
                return manifest
            if is_object(name):
                self._objects, self._nbytes = self._objects + 1, self._nbytes + member.size
                if self._kv:
                    self._write(tar, member, durable=False)  # what is lost of it in a crash is computed again
            elif is_catalog(name) or (name == SECRET and member.size == SECRET_NBYTES):
                self._files[name] = self._write(tar, member, durable=True)
            else:
                raise ObjectCorrupt(f"the snapshot {archive} holds {name[:80]!r}, which no snapshot does")
        raise _cut_short(archive)

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, durable: bool) -> File:
        path = self._root / member.name
        self._make(path.parent)
        data = tar.extractfile(member)
        assert data is not None  # it is a plain file
        digest, nbytes = hashlib.blake2b(digest_size=32), 0
        try:
            fd = os.open(path, CREATE, 0o600)
        except FileExistsError:
            raise ObjectCorrupt(f"the snapshot holds {member.name} twice") from None
        with open(fd, "wb") as file:
            while block := data.read(_BLOCK):
                digest.update(block)
                nbytes += len(block)
                file.write(block)
            file.flush()
            if durable:
                os.fsync(fd)
        if nbytes != member.size:
            raise ObjectCorrupt(f"the snapshot was cut short in {member.name}")
        return File(nbytes, digest.hexdigest())

    def _make(self, folder: Path) -> None:
        if not folder.exists():
            self._make(folder.parent)
            folder.mkdir(mode=0o700)

    def _check(self, manifest: Manifest, archive: Path) -> None:
        if self._files != manifest.files:
            wrong = [
                name for name in {*self._files, *manifest.files} if self._files.get(name) != manifest.files.get(name)
            ]
            raise ObjectCorrupt(f"the snapshot {archive} is damaged: {', '.join(sorted(wrong)[:5])} is not as it was")
        counted = (manifest.kv.objects, manifest.kv.nbytes) if manifest.kv is not None else (0, 0)
        if (self._objects, self._nbytes) != counted:
            raise ObjectCorrupt(f"the snapshot {archive} is damaged: it should hold {counted[0]} objects of KV")
        for name in manifest.files:
            if is_catalog(name):
                check_catalog(self._root / name)


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        # Uncompressed only: so nothing in it is larger than the file is.
        with tarfile.open(archive.expanduser(), mode="r:") as tar:
            yield tar
    except FileNotFoundError:
        raise NotFound("snapshot", str(archive)) from None
    except tarfile.TarError as error:
        raise ObjectCorrupt(f"{archive} is no snapshot, or damaged: {error}") from error
    except OSError as error:
        raise TierUnavailable(f"the snapshot {archive}: {describe(error)}") from error


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        if member.type != tarfile.REGTYPE or member.issparse() or member.size < 0:
            raise ObjectCorrupt(f"the snapshot holds {member.name[:80]!r}, which is no plain file")
        yield member
        tar.members.clear()  # type: ignore[attr-defined] # or it keeps them all in memory


def _manifest(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Manifest:
    if member.size > MANIFEST_NBYTES:
        raise ObjectCorrupt(f"the snapshot's manifest has {member.size} bytes; at most {MANIFEST_NBYTES} are allowed")
    data = tar.extractfile(member)
    assert data is not None  # it is a plain file
    return Manifest.decode(data.read())


def _cut_short(archive: Path) -> ObjectCorrupt:
    return ObjectCorrupt(f"{archive} is no whole snapshot: it has no {MANIFEST} at its end")
